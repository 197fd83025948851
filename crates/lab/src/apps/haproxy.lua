-- Each request computes for as long as it says: `core.now` stands still in a service, and HAProxy's Lua cannot sleep
-- without yielding.
core.register_service("work", "http", function(applet)
  local us = tonumber(string.match(applet.qs or "", "us=(%d+)")) or 0
  if us > 10000 then
    local ends = os.clock() + us / 1e6
    while os.clock() < ends do end
  end
  applet:set_status(200)
  applet:add_header("content-length", "3")
  applet:start_response()
  applet:send("ok\n")
end)
