// The smallest gateway: starts a supervised host, runs one turn, prints what is streamed.
import { spawn } from "node:child_process";
import { createInterface } from "node:readline";

const [supervisor, ...args] = process.argv.slice(2);
const host = spawn(supervisor, ["run", ...args], { stdio: ["pipe", "pipe", "inherit"] });
const send = (frame) => host.stdin.write(JSON.stringify(frame) + "\n");

send({ type: "turn.start", sid: "s1", request_id: "r1", text: "Hello, world" });
for await (const line of createInterface({ input: host.stdout })) {
  const frame = JSON.parse(line);
  if (frame.type === "rpc" && frame.message.method === "event") {
    const event = frame.message.params;
    if (event.type === "message.delta") process.stdout.write(event.payload.text);
  } else if (["turn.end", "turn.error"].includes(frame.type) && frame.request_id === "r1") {
    console.log();
    send({ type: "shutdown", request_id: "bye" });
  } else if (["host.exited", "host.gave_up"].includes(frame.type)) {
    console.error(frame);
  }
}
host.on("exit", (code) => process.exit(code));
if (host.exitCode !== null) process.exit(host.exitCode);
