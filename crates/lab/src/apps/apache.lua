require "apache2"
function handle(r)
  r.usleep(tonumber(string.match(r.args or "", "us=(%d+)")) or 0)
  r:puts("ok\n")
  return apache2.OK
end
