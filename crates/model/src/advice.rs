//! The setting of each well-known server that gives each of its workers a socket of its own, or that wakes fewer.

/// The advice where a UNIX socket's workers do not wait in epoll.
pub const EPOLL: &str = "UNIX sockets have no SO_REUSEPORT, so the workers share this one: have each wait for it in an epoll set of its own (an event loop), then `wakeone attach` steers it";

/// Returns how to give each worker of this server (by process name) its own listening socket. `address`: where it
/// listens.
pub fn own_sockets(name: &str, address: &str) -> String {
    let port = address.rsplit_once(':').map_or(address, |(_, port)| port);
    match server(name) {
        "nginx" => format!("nginx: `listen {port} reuseport;`, then `nginx -s reload`"),
        "haproxy" => format!("haproxy: `bind :{port} shards by-thread`"),
        "gunicorn" => {
            "gunicorn: `--reuse-port` (24 and newer; an older one still has one socket), or `--threads 4`, whose workers share one queue and wait for it in epoll".into()
        }
        "apache2" | "httpd" => "Apache: `ListenCoresBucketsRatio 1` gives a socket for every core".into(),
        "envoy" => "Envoy: `enable_reuse_port: true` on the listener (the default since 1.20)".into(),
        "unbound" => "unbound: `so-reuseport: yes`".into(),
        "knotd" => "knot: `udp-workers: N` in the section `server`, of which each has a socket".into(),
        "named" => "BIND: `reuseport yes;` in `options`".into(),
        "dnsdist" => format!("dnsdist: `setLocal(\"{address}\", {{ reusePort=true }})`, once for each thread"),
        "pdns_recursor" => "PowerDNS Recursor: `reuseport=yes`".into(),
        "pdns_server" => "PowerDNS: `reuseport=yes` and `receiver-threads=N`".into(),
        "node" => {
            "node: `server.listen({ port, reusePort: true })` in each process (23.1 and newer), without cluster".into()
        }
        "granian" => format!(
            "granian: `wakeone run -w N -l {address} -- granian --workers 1 --port {{port}} APP`, where each has a socket"
        ),
        "squid" => format!("squid: `http_port {port} worker-queues` (5 and newer)"),
        TRAFFIC_SERVER => {
            "Traffic Server: `CONFIG proxy.config.exec_thread.listen INT 1` and `CONFIG proxy.config.accept_threads INT 0` in records.config".into()
        }
        "uwsgi" => format!(
            "uWSGI: `wakeone run -w N -l {address} -- uwsgi --http-socket fd://{{fd}} …`, or `--socket fd://{{fd}}` behind nginx, one process each (`--reuse-port` alone gives one socket that all share)"
        ),
        "pgbouncer" => format!(
            "pgbouncer: `wakeone run -w N -l {address} --user NAME -- pgbouncer CONFIG`, as it refuses to be root's; or `so_reuseport = 1` in several that you start yourself"
        ),
        "java" => format!(
            "Java servers take a listener as descriptor 0: `wakeone run -w N -l {address} --stdin -- COMMAND`, with `useInheritedChannel=\"true\"` at Tomcat's Connector, or `inheritChannel` true at Jetty's ServerConnector"
        ),
        "php-fpm" | "memcached" | "redis-server" => {
            format!("{name} cannot: one socket is all that it knows")
        }
        _ => format!(
            "start it under Wakeone: `wakeone run -w N -l {address} -- COMMAND`, with {{fd}} or {{port}} where it takes a listener or a port; or set SO_REUSEPORT in each worker and listen there"
        ),
    }
}

/// How to have this server wake one worker for a connection instead of all.
pub fn wake_one(name: &str) -> String {
    match server(name) {
        "nginx" => "nginx: it uses EPOLLEXCLUSIVE since 1.11.3 unless `accept_mutex on` or `use poll` is set".into(),
        "apache2" | "httpd" => "Apache: with one `Listen` blocking accept serves; `Mutex sysvsem default` puts a lock around accept".into(),
        "gunicorn" => "gunicorn: `--reuse-port` (24 and newer) gives each worker a socket of its own".into(),
        _ => "add EPOLLEXCLUSIVE when the listener is added to the epoll set, or block in accept(), or give each worker a socket (SO_REUSEPORT)".into(),
    }
}

const TRAFFIC_SERVER: &str = "traffic_server";

/// Process names carry versions and roles: `php-fpm8.2`, `gunicorn: worker`. Traffic Server names its threads.
fn server(name: &str) -> &str {
    if ["[TS_MAIN]", "[ET_NET", "[ACCEPT"]
        .iter()
        .any(|thread| name.starts_with(thread))
    {
        return TRAFFIC_SERVER;
    }
    let known = [
        "nginx",
        "haproxy",
        "gunicorn",
        "apache2",
        "httpd",
        "envoy",
        "unbound",
        "knotd",
        "named",
        "dnsdist",
        "pdns_recursor",
        "pdns_server",
        "node",
        "granian",
        "php-fpm",
        "memcached",
        "redis-server",
        "squid",
        TRAFFIC_SERVER,
        "uwsgi",
        "pgbouncer",
        "java",
    ];
    known
        .into_iter()
        .find(|known| name.starts_with(known))
        .unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_servers_get_their_own_setting() {
        for (name, setting) in [
            ("nginx", "listen 80 reuseport"),
            ("haproxy", "bind :80 shards by-thread"),
            ("gunicorn", "--reuse-port` (24 and newer"),
            ("gunicorn: worker", "or `--threads 4`"),
            ("apache2", "ListenCoresBucketsRatio 1"),
            ("httpd", "ListenCoresBucketsRatio 1"),
            ("envoy", "enable_reuse_port: true"),
            ("unbound", "so-reuseport: yes"),
            ("knotd", "udp-workers: N"),
            ("named", "reuseport yes;"),
            ("dnsdist", "setLocal(\"0.0.0.0:80\", { reusePort=true })"),
            ("pdns_recursor", "reuseport=yes"),
            ("pdns_server", "receiver-threads=N"),
            ("node", "reusePort: true"),
            (
                "granian",
                "-l 0.0.0.0:80 -- granian --workers 1 --port {port}",
            ),
            ("squid", "`http_port 80 worker-queues`"),
            ("[ET_NET 0]", "exec_thread.listen INT 1"),
            ("traffic_server", "accept_threads INT 0"),
            ("uwsgi", "-- uwsgi --http-socket fd://{fd}"),
            ("pgbouncer", "--user NAME -- pgbouncer"),
            ("java", "-l 0.0.0.0:80 --stdin --"),
            ("php-fpm8.2", "php-fpm8.2 cannot"),
            ("memcached", "memcached cannot"),
            ("redis-server", "redis-server cannot"),
        ] {
            let told = own_sockets(name, "0.0.0.0:80");
            assert!(told.contains(setting), "{name}: {told}");
        }
        assert!(own_sockets("mine", "[::1]:80").contains("wakeone run -w N -l [::1]:80"));
    }

    #[test]
    fn known_servers_have_a_setting_that_wakes_one_worker() {
        for (name, setting) in [
            ("nginx", "accept_mutex on"),
            ("apache2", "Mutex sysvsem default"),
            ("gunicorn: worker", "--reuse-port"),
            ("mine", "add EPOLLEXCLUSIVE"),
        ] {
            let told = wake_one(name);
            assert!(told.contains(setting), "{name}: {told}");
        }
    }
}
