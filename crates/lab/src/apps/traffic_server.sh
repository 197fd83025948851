# Traffic Server with four threads. $1: whether each listens.
mkdir -p {dir}/run
cp -r /etc/trafficserver {dir}/etc
cat > {dir}/etc/records.config <<END
CONFIG proxy.config.http.server_ports STRING {port}
CONFIG proxy.config.exec_thread.autoconfig INT 0
CONFIG proxy.config.exec_thread.limit INT {workers}
CONFIG proxy.config.exec_thread.listen INT $1
CONFIG proxy.config.accept_threads INT $((1 - $1))
CONFIG proxy.config.http.cache.http INT 0
CONFIG proxy.config.admin.user_id STRING nobody
CONFIG proxy.config.log.logging_enabled INT 0
END
echo '{dir}/run 16M' > {dir}/etc/storage.config
cat > {dir}/root.yaml <<END
prefix: {dir}
exec_prefix: /usr
bindir: /usr/bin
sbindir: /usr/bin
sysconfdir: {dir}/etc
libdir: /usr/lib/trafficserver
libexecdir: /usr/lib/trafficserver/modules
datadir: {dir}/run
localstatedir: {dir}/run
runtimedir: {dir}/run
logdir: {dir}/run
cachedir: {dir}/run
END
chmod 755 {dir}
chown -R nobody {dir}/run {dir}/etc
echo starts
exec traffic_server --run-root={dir}/root.yaml
