#!/bin/sh
# h3.sh COMMAND...: makes a certificate, as h3.crt and h3.key in the directory of this file, and starts a server of HTTP/3.
# LISTEN has options of nginx's `listen` in h3.conf.
at=$(dirname "$0")
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost \
    -keyout "$at/h3.key" -out "$at/h3.crt" 2>"$at/openssl.log" || exit 1
# Workers of another user read it, and the files.
chmod 755 "$at"
chmod 644 "$at/h3.key"
head -c 500000 /dev/zero >"$at/download"
[ -z "${LISTEN-}" ] || sed -i "s/ quic;/ quic $LISTEN;/" "$at/h3.conf"
exec "$@"
