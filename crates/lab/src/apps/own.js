// A node server on an inherited socket: FD. It blocks its only thread for as long as a request says, and counts before it answers.
const fs = require('fs');
const http = require('http');

const count = fs.openSync(process.env.WAKEONE_COUNT, 'a');
const never = new Int32Array(new SharedArrayBuffer(4));
const server = http.createServer({ keepAliveTimeout: 75000 }, (request, response) => {
  const us = Number(new URL(request.url, 'http://localhost').searchParams.get('us') ?? 0);
  if (us > 0) Atomics.wait(never, 0, 0, us / 1000);
  fs.writeSync(count, '.');
  response.setHeader('X-Worker', process.pid);
  response.end('ok\n');
});
server.listen({ fd: Number(process.argv[2]), backlog: 4096 }, () => console.log('serving'));
process.on('SIGTERM', () => {
  server.close(() => process.exit(0));
  setTimeout(() => { server.closeAllConnections(); process.exit(0); }, 1000);
});
