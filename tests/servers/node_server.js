// A plain node server on the descriptor that it is given. SIGTERM: what was accepted is finished.
const http = require('http');

const me = JSON.stringify({ slot: Number(process.env.WAKEONE_SLOT), pid: process.pid });
const server = http.createServer((request, response) => response.end(me));
server.listen({ fd: Number(process.argv[2]) });
process.on('SIGTERM', () => server.close());
