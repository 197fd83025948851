"""dns.py HOST PORT SECONDS SEED: dnsperf sends queries over UDP. Prints the result as one line of JSON."""

import json
import re
import subprocess
import sys
import tempfile

host, port, seconds, _ = sys.argv[1:]
with tempfile.NamedTemporaryFile("w") as queries:
    queries.writelines(f"w{n}.test. A\n" for n in range(100))
    queries.flush()
    command = ["dnsperf", "-s", host, "-p", port, "-d", queries.name, "-l", seconds, "-Q", "500", "-c", "40", "-v"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
answers = re.findall(r"^> \S+ \S+ A ([0-9.]+)$", said, re.MULTILINE)
sent, lost = (int(re.search(rf"Queries {what}: +(\d+)", said).group(1)) for what in ["sent", "lost"])
print(json.dumps({"sent": sent, "lost": lost, "latency_ms": [float(seconds) * 1e3 for seconds in answers]}))
