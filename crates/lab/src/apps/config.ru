# Sleeps for as long as the request says, on the worker's only thread, and counts before it answers.
COUNT = File.open(ENV.fetch('WAKEONE_COUNT'), 'ab')
COUNT.sync = true

run lambda { |env|
  us = env['QUERY_STRING'][/us=(\d+)/, 1].to_i
  sleep us / 1e6 if us > 0
  COUNT.write('.')
  [200, { 'Content-Type' => 'text/plain', 'X-Worker' => Process.pid.to_s }, ["ok\n"]]
}
