// A node cluster: PORT POLICY WORKERS, where POLICY is rr (the primary accepts) or none (the workers do).
const cluster = require('cluster');
const http = require('http');

const [port, policy, workers] = process.argv.slice(2);
cluster.schedulingPolicy = policy === 'rr' ? cluster.SCHED_RR : cluster.SCHED_NONE;
if (cluster.isPrimary) {
  for (let i = 0; i < Number(workers); i++) cluster.fork();
} else {
  http.createServer((request, response) => response.end('ok')).listen(Number(port), '127.0.0.1');
}
