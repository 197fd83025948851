// A cluster whose workers accept for themselves: PORT WORKERS. Each sleeps for as long as the request says, on its only thread,
// and counts before it answers.
const cluster = require('cluster');
const fs = require('fs');
const http = require('http');

const [port, workers] = process.argv.slice(2).map(Number);
cluster.schedulingPolicy = cluster.SCHED_NONE;
if (cluster.isPrimary) {
  for (let i = 0; i < workers; i++) cluster.fork();
  console.log('ready');
} else {
  const count = fs.openSync(process.env.WAKEONE_COUNT, 'a');
  const never = new Int32Array(new SharedArrayBuffer(4));
  const answer = (request, response) => {
    const us = Number(new URL(request.url, 'http://localhost').searchParams.get('us') ?? 0);
    if (us > 0) Atomics.wait(never, 0, 0, us / 1000);
    fs.writeSync(count, '.');
    response.setHeader('X-Worker', process.pid);
    response.end('ok\n');
  };
  http.createServer({ keepAliveTimeout: 75000 }, answer).listen({ port, host: '127.0.0.1', backlog: 4096 });
}
