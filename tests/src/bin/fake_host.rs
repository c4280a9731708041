//! A host that misbehaves on command, for tests of the supervisor.
//!
//! Flags say what it does at its start; later it does what frames of type `fake` say, and answers
//! the others as a host does, with nothing behind it.

use std::io::{self, BufRead, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio, exit};
use std::time::Duration;

use serde_json::{Value, json};

fn main() -> io::Result<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let flag = |name: &str| arguments.iter().any(|argument| argument == name);
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1).cloned()
    };
    if let Some(path) = value("--dump") {
        std::fs::write(path, facts().to_string())?;
    }
    if flag("--junk") {
        say_raw("this is no frame\n{\"type\":\"half")?;
        say_raw("\n")?;
    }
    if let Some(code) = value("--exit") {
        exit(code.parse().unwrap_or(1));
    }
    if flag("--silent") {
        wait_for_ever();
    }
    let home = std::env::var("TURNHOST_HOME").unwrap_or_default();
    let mut hello = json!({
        "type": "hello",
        "host_pid": std::process::id(),
        "boot_id": turnhost_protocol::process::random_hex32(),
        "build_sha": value("--build").unwrap_or_else(|| "unknown".to_owned()),
        "version": "fake",
        "home": value("--home").unwrap_or(home),
        "heartbeat_secs": value("--beats").and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0),
    });
    if let Some(version) = value("--protocol") {
        hello["protocol_version"] = json!(version.parse::<u32>().unwrap_or(0));
    }
    say(&hello)?;
    if let Some(code) = value("--exit-after-hello") {
        exit(code.parse().unwrap_or(1));
    }
    for line in io::stdin().lock().lines() {
        let line = line?;
        match serde_json::from_str::<Value>(&line) {
            Ok(frame) => answer(&frame, &line)?,
            Err(_) => say(&json!({"type": "error", "message": "invalid json", "line": line}))?,
        }
    }
    if flag("--outlive-input") {
        wait_for_ever();
    }
    Ok(())
}

/// What a host can see of what it was given.
fn facts() -> Value {
    let environment: serde_json::Map<String, Value> = std::env::vars()
        .map(|(name, value)| (name, value.into()))
        .collect();
    let descriptors: Vec<i32> = std::fs::read_dir("/proc/self/fd")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    json!({
        "environment": environment,
        // The folder itself is open while it is read.
        "descriptors": descriptors.len().saturating_sub(1),
        "session": rustix::process::getsid(None).map_or(0, |id| id.as_raw_nonzero().get()),
        "arguments": std::env::args().collect::<Vec<_>>(),
    })
}

fn answer(frame: &Value, line: &str) -> io::Result<()> {
    let (sid, id) = (&frame["sid"], &frame["request_id"]);
    match frame["type"].as_str().unwrap_or_default() {
        "fake" => obey(frame),
        "hello.ack" => Ok(()),
        "turn.start" => {
            say(&json!({"type": "turn.accepted", "sid": sid, "request_id": id}))?;
            match frame["text"].as_str().unwrap_or_default() {
                "hang" => Ok(()),
                "refuse" => say(&json!({"type": "error", "request_id": id, "message": "refused"})),
                "twice" => {
                    say(&json!({"type": "turn.end", "sid": sid, "request_id": id}))?;
                    say(&json!({"type": "turn.error", "sid": sid, "request_id": id}))
                }
                _ => say(&json!({"type": "turn.end", "sid": sid, "request_id": id, "line": line})),
            }
        }
        "interrupt" => {
            say(&json!({"type": "interrupt.ack", "sid": sid, "request_id": id, "applied": false}))
        }
        "control" if frame["route_name"] == "hang" => Ok(()),
        "control" => say(&json!({"type": "control.ack", "sid": sid, "request_id": id})),
        "respond" if frame["params"]["hang"] == true => Ok(()),
        "respond" => say(&json!({"type": "respond.ack", "sid": sid, "request_id": id,
            "response": {"jsonrpc": "2.0", "id": id, "result": {"status": "ok"}}})),
        "session.close" if sid == "hang" => Ok(()),
        "idle.probe" if sid == "hang" => Ok(()),
        "idle.probe" => say(&json!({"type": "idle.verdict", "request_id": id, "idle": true})),
        "shutdown" => {
            say(&json!({"type": "shutdown.ack", "request_id": id}))?;
            exit(0);
        }
        kind => say(&json!({"type": "error", "request_id": id,
            "message": format!("unknown frame type: {kind}"), "line": line})),
    }
}

fn obey(frame: &Value) -> io::Result<()> {
    match frame["do"].as_str().unwrap_or_default() {
        "exit" => exit(i32::try_from(frame["code"].as_i64().unwrap_or(0)).unwrap_or(1)),
        "abort" => std::process::abort(),
        "say" => say(&frame["frame"]),
        "raw" => say_raw(frame["text"].as_str().unwrap_or_default()),
        "flood" => {
            let line = format!("{}\n", frame["frame"]);
            for _ in 0..frame["count"].as_u64().unwrap_or(0) {
                say_raw(&line)?;
            }
            Ok(())
        }
        "stop" => {
            let own = rustix::process::getpid();
            rustix::process::kill_process(own, rustix::process::Signal::STOP)?;
            Ok(())
        }
        "stop reading" => wait_for_ever(),
        "close output" => {
            rustix::stdio::dup2_stdout(std::fs::File::open("/dev/null")?)?;
            Ok(())
        }
        "close input" => {
            rustix::stdio::dup2_stdin(std::fs::File::open("/dev/null")?)?;
            wait_for_ever()
        }
        "beat for ever" => loop {
            say(&json!({"type": "hb"}))?;
            std::thread::sleep(Duration::from_millis(50));
        },
        "burn" => loop {
            std::hint::spin_loop();
        },
        // A process that keeps the pipes open: in the host's session, or in one of its own.
        "grandchild" => {
            let mut command = Command::new("sleep");
            command
                .arg("1000")
                .stdin(Stdio::inherit())
                .stdout(Stdio::inherit());
            if frame["deaf"] == true {
                command = Command::new("sh");
                command.args(["-c", "trap '' TERM; sleep 1000; sleep 1000"]);
            }
            if frame["own_session"] == true {
                // SAFETY: one system call that is safe between fork and exec.
                unsafe {
                    command.pre_exec(|| rustix::process::setsid().map(drop).map_err(Into::into))
                };
            }
            let child = command.spawn()?;
            say(&json!({"type": "fake.child", "pid": child.id()}))
        }
        other => say(&json!({"type": "error", "message": format!("cannot {other}")})),
    }
}

fn say(frame: &Value) -> io::Result<()> {
    say_raw(&format!("{frame}\n"))
}

fn say_raw(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()
}

fn wait_for_ever() -> ! {
    loop {
        std::thread::park();
    }
}
