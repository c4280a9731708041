"""The smallest gateway: starts a supervised host, runs one turn, prints what is streamed."""
import json, subprocess, sys

supervisor, *arguments = sys.argv[1:]
host = subprocess.Popen([supervisor, "run", *arguments],
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

def send(frame):
    host.stdin.write(json.dumps(frame) + "\n")
    host.stdin.flush()

send({"type": "turn.start", "sid": "s1", "request_id": "r1", "text": "Hello, world"})
for line in host.stdout:
    frame = json.loads(line)
    if frame["type"] == "rpc" and frame["message"].get("method") == "event":
        event = frame["message"]["params"]
        if event["type"] == "message.delta":
            print(event["payload"]["text"], end="", flush=True)
    elif frame["type"] in ("turn.end", "turn.error") and frame["request_id"] == "r1":
        break
    elif frame["type"] in ("host.exited", "host.gave_up"):
        print(frame, file=sys.stderr)
print()
send({"type": "shutdown", "request_id": "bye"})
host.stdout.read()
sys.exit(host.wait())
