// A node cluster: PORT POLICY WORKERS, where POLICY is rr (the primary accepts) or none (the workers do). A worker that dies
// has a successor. Answers `ok`, or the word of ?word=WORD; after N ms where there is an ms=N.
const cluster = require('cluster');
const http = require('http');

const [port, policy, workers] = process.argv.slice(2);
cluster.schedulingPolicy = policy === 'rr' ? cluster.SCHED_RR : cluster.SCHED_NONE;
if (cluster.isPrimary) {
  for (let i = 0; i < Number(workers); i++) cluster.fork();
  cluster.on('exit', () => cluster.fork());
} else {
  const answer = (request, response) => {
    const asked = new URL(request.url, 'http://localhost').searchParams;
    const said = () => response.end(asked.get('word') ?? 'ok');
    if (asked.has('ms')) setTimeout(said, Number(asked.get('ms')));
    else said();
  };
  http.createServer(answer).listen(Number(port), '127.0.0.1');
}
