//! The reference's own supervisor can drive this host. This plays it: it sends what that
//! supervisor sends and accepts only what it accepts.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use turnhost_protocol::process::random_hex32;
use turnhost_tests::host::Exit;
use turnhost_tests::{Frame, Host, Options, turn};

/// How long the reference waits for `hello`.
const HELLO: Duration = Duration::from_secs(10);

/// What the reference's supervisor knows of a host: it reads frames one by one, and looks at
/// nothing but the fields named here.
struct Supervisor {
    host: Host,
    read: usize,
    pending_turns: HashMap<String, Option<Value>>,
    replies: HashMap<String, Value>,
    forwarded: Vec<Value>,
}

impl Supervisor {
    fn start(home: &tempfile::TempDir) -> Self {
        let start = Instant::now();
        let path = home.path();
        // It gives no flags: the environment carries all.
        let options = Options::default()
            .home(path)
            .without_home_flag()
            .env("HERMES_HOME", path)
            .env("HERMES_TUI_RPC_POOL_WORKERS", "4")
            .env("HERMES_COMPUTE_HOST_HEARTBEAT_SECS", "0.1");
        let host = Host::start(options);
        assert!(start.elapsed() < HELLO, "did not send hello");
        let hello = host.hello();
        assert_eq!(hello["type"], "hello");
        assert_eq!(hello["host_pid"], host.child_pid().as_raw_nonzero().get());
        assert_eq!(hello["hermes_home"], path.to_str().expect("UTF-8"));
        assert_eq!(hello["build_sha"], "unknown");
        assert!(hello["boot_id"].is_string());
        Self {
            host,
            read: 1,
            pending_turns: HashMap::new(),
            replies: HashMap::new(),
            forwarded: Vec::new(),
        }
    }

    /// Takes a frame as the reference's reader does.
    fn take(&mut self, frame: &Frame) {
        let id = frame["request_id"].as_str().unwrap_or_default().to_owned();
        match frame.kind() {
            "rpc" => {
                assert!(frame["message"].is_object());
                self.forwarded.push(frame["message"].clone());
            }
            "turn.end" | "turn.error" => {
                let turn = self.pending_turns.get_mut(&id).expect("a turn of ours");
                assert!(turn.is_none(), "completed twice");
                *turn = Some(frame.value().clone());
            }
            "respond.ack" | "respond.error" | "control.ack" | "control.error" | "interrupt.ack"
            | "reload_mcp.ack" | "shutdown.ack" => {
                let earlier = self.replies.insert(id, frame.value().clone());
                assert!(earlier.is_none(), "answered twice");
            }
            // It knows these and does nothing with them, or does not know them.
            _ => {}
        }
    }

    fn read_until<T>(&mut self, what: &str, mut done: impl FnMut(&Self) -> Option<T>) -> T {
        loop {
            if let Some(result) = done(self) {
                return result;
            }
            let read = self.read;
            let mut index = 0;
            let frame = self.host.find(what, |frame| {
                index += 1;
                (index > read).then(|| frame.clone())
            });
            self.read += 1;
            self.take(&frame);
        }
    }

    fn submit_turn(&mut self, sid: &str, text: &str) -> String {
        let id = random_hex32();
        self.pending_turns.insert(id.clone(), None);
        let mut frame = turn(sid, &id, text);
        frame["session_key"] = json!(format!("key-{sid}"));
        frame["history"] = json!([]);
        frame["history_version"] = json!(0);
        frame["cols"] = json!(80);
        frame["cwd"] = json!("/tmp");
        frame["source"] = json!("tui");
        self.host.send(&frame);
        id
    }

    fn completed(&mut self, id: &str) -> Value {
        self.read_until("the completion of a turn", |supervisor| {
            supervisor.pending_turns[id].clone()
        })
    }

    fn call(&mut self, mut frame: Value) -> Value {
        let id = random_hex32();
        frame["request_id"] = json!(id);
        self.host.send(&frame);
        self.read_until("a reply", |supervisor| supervisor.replies.get(&id).cloned())
    }

    fn events(&self, sid: &str) -> Vec<&str> {
        self.forwarded
            .iter()
            .map(|message| &message["params"])
            .filter(|params| params["session_id"] == sid)
            .filter_map(|params| params["type"].as_str())
            .collect()
    }
}

#[test]
fn the_reference_supervisor_drives_this_host() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let mut supervisor = Supervisor::start(&home);
    assert_eq!(supervisor.host.hello()["workers"], 4);

    let id = supervisor.submit_turn("s1", "SAY hi");
    let end = supervisor.completed(&id);
    assert_eq!(end["type"], "turn.end");
    assert_eq!(end["session_key"], "key-s1");
    assert_eq!(end["history_version"], 1);
    assert_eq!(end["message_count"], 2);
    assert_eq!(end["interrupted"], false);
    assert!(end["session_info"].is_object());
    let events = supervisor.events("s1");
    for kind in [
        "message.start",
        "message.delta",
        "message.complete",
        "session.info",
    ] {
        assert!(events.contains(&kind), "{events:?}");
    }

    // Two sessions at once, one of them interrupted.
    let held = r#"!script [{"delta":"x"},{"sleep_ms":3600000}]"#;
    let first = supervisor.submit_turn("s2", held);
    let second = supervisor.submit_turn("s3", "words");
    assert_eq!(supervisor.completed(&second)["type"], "turn.end");
    let ack = supervisor.call(json!({"type": "interrupt", "sid": "s2"}));
    assert_eq!(
        (&ack["type"], &ack["applied"]),
        (&json!("interrupt.ack"), &json!(true))
    );
    assert_eq!(supervisor.completed(&first)["interrupted"], true);

    // A refused turn completes too.
    let live = supervisor.submit_turn("s4", held);
    let busy = supervisor.submit_turn("s4", "x");
    let error = supervisor.completed(&busy);
    assert_eq!(error["type"], "turn.error");
    assert_eq!(error["message"], "session busy");
    supervisor.call(json!({"type": "interrupt", "sid": "s4"}));
    supervisor.completed(&live);

    // Whatever a control or a response is answered, it is answered in a type it waits for.
    for (frame, kinds) in [
        (
            json!({"type": "respond", "sid": "s1", "params":
                   {"frame": {"jsonrpc": "2.0", "id": "srq-000000000000", "result": {}}}}),
            ["respond.ack", "respond.error"],
        ),
        (
            json!({"type": "control", "sid": "s1", "route_name": "session.history.reload",
                   "command": "", "session_key": "key-s1"}),
            ["control.ack", "control.error"],
        ),
        (
            json!({"type": "reload_mcp", "sid": "s1"}),
            ["reload_mcp.ack", "control.error"],
        ),
    ] {
        let reply = supervisor.call(frame);
        let kind = reply["type"].as_str().expect("a type");
        assert!(kinds.contains(&kind), "{reply}");
    }

    let beats = supervisor.host.wait_for("hb", |frame| frame.kind() == "hb");
    assert!(beats["active_turns"].is_number() && beats["progress_counter"].is_number());

    let ack = supervisor.call(json!({"type": "shutdown"}));
    assert_eq!(ack["type"], "shutdown.ack");
    assert_eq!(supervisor.host.exit(), Exit::Code(0));
    assert!(supervisor.pending_turns.values().all(Option::is_some));
}

#[test]
fn closing_the_pipe_ends_the_host_as_the_reference_expects() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let mut supervisor = Supervisor::start(&home);
    let id = supervisor.submit_turn("s1", "x");
    supervisor.completed(&id);
    supervisor.host.close_stdin();
    assert_eq!(supervisor.host.exit(), Exit::Code(0));
}
