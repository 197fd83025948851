# Four workers of squid. $1: options of http_port.
chmod 755 {dir}
mkdir -p {dir}/run
chown proxy {dir}/run
cat > {dir}/squid.conf <<END
http_port {address} $1
workers {workers}
pid_filename none
cache_log {dir}/run/cache.log
access_log none
cache deny all
http_access deny all
coredump_dir {dir}/run
shutdown_lifetime 1 second
END
echo starts
# It closes its output, and would seem to have ended.
squid --foreground -n wakeone{port} -f {dir}/squid.conf &
trap 'kill $!; wait' TERM
wait
