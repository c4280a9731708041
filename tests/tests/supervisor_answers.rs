//! SPEC §9: what a gateway hears of its frames when the host ends, or while none runs.

use serde_json::{Value, json};
use turnhost_tests::host::Exit;
use turnhost_tests::{Gateway, Supervision, interrupt, turn};

/// Frames for a host that answers none of them.
fn unanswered() -> Vec<Value> {
    vec![
        turn("s1", "t1", "hang"),
        json!({"type": "control", "sid": "s1", "request_id": "c1", "route_name": "hang"}),
        json!({"type": "respond", "sid": "s1", "request_id": "r1", "params": {"hang": true}}),
        json!({"type": "session.close", "sid": "hang", "request_id": "x1"}),
        json!({"type": "idle.probe", "sid": "hang", "request_id": "p1"}),
        json!({"type": "turn.start", "sid": "nameless", "text": "hang"}),
    ]
}

fn question(id: &str) -> Value {
    json!({"type": "fake", "do": "say", "frame": {"type": "rpc", "sid": "s1", "message":
        {"jsonrpc": "2.0", "id": id, "method": "clarify", "params": {"session_id": "s1"}}}})
}

fn events(gateway: &Gateway, kind: &str) -> Vec<Value> {
    let frames = gateway.frames_of_kind("rpc");
    let params = frames
        .iter()
        .map(|frame| frame["message"]["params"].clone());
    params.filter(|params| params["type"] == kind).collect()
}

#[test]
fn a_crash_answers_everything_once() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    for frame in unanswered() {
        gateway.send(&frame);
    }
    for id in ["srq-1", "srq-2", "srq-3"] {
        gateway.send(&question(id));
    }
    // One question is answered, one is withdrawn by the host itself.
    gateway.send(&json!({"type": "respond", "sid": "s1", "request_id": "r2",
        "params": {"frame": {"jsonrpc": "2.0", "id": "srq-1", "result": {}}}}));
    gateway.send(
        &json!({"type": "fake", "do": "say", "frame": {"type": "rpc", "sid": "s1",
        "message": {"jsonrpc": "2.0", "method": "event", "params": {"type": "request.cancel",
        "session_id": "s1", "payload": {"id": "srq-2"}}}}}),
    );
    gateway.answer("r2");
    gateway.fake("abort");

    let exited = gateway.wait_kind("host.exited", 1);
    assert_eq!(
        (
            &exited["code"],
            &exited["signal"],
            &exited["will_retry"],
            &exited["delay_ms"]
        ),
        (&json!(null), &json!(6), &json!(true), &json!(250))
    );
    assert_eq!(exited["restarts_in_window"], 1);
    let terminal = gateway.answer("t1");
    assert_eq!(terminal["type"], "turn.error");
    assert_eq!(
        (
            &terminal["reason"],
            &terminal["execution_state"],
            &terminal["sid"]
        ),
        (&json!("crash"), &json!("unknown"), &json!("s1"))
    );
    assert_eq!(terminal["message"], "the host was killed by signal 6");
    assert_eq!(gateway.answer("c1")["type"], "control.error");
    assert_eq!(gateway.answer("r1")["type"], "respond.error");
    assert_eq!(gateway.answer("x1")["type"], "error");
    let verdict = gateway.answer("p1");
    assert_eq!(
        (&verdict["type"], &verdict["idle"]),
        (&json!("idle.verdict"), &json!(null))
    );
    gateway.wait_for("the turn without an id", |frame| {
        frame["type"] == "turn.error" && frame["sid"] == "nameless"
    });
    gateway.wait_kind("hello", 2);
    assert_eq!(events(&gateway, "error").len(), 2, "one for each turn");
    let cancelled = events(&gateway, "request.cancel");
    let crashed: Vec<_> = cancelled
        .iter()
        .filter(|event| event["payload"]["reason"] == "crash")
        .collect();
    assert_eq!(crashed.len(), 1);
    assert_eq!(crashed[0]["payload"]["id"], "srq-3");
    assert_eq!(crashed[0]["payload"]["method"], "clarify");
    // The next host works, and nothing was sent to it again.
    assert_eq!(gateway.ask(&turn("s1", "t2", "x"))["type"], "turn.end");
    for id in ["t1", "c1", "r1", "x1", "p1"] {
        let answers = gateway
            .frames()
            .into_iter()
            .filter(|frame| frame["request_id"] == id && frame["type"] != "turn.accepted");
        assert_eq!(answers.count(), 1, "{id}");
    }
}

#[test]
fn an_interrupt_that_a_crash_leaves_open_gets_an_error() {
    let short = Supervision::of_fake(&[]).args(["--max-frame-bytes", "1024"]);
    let mut gateway = Gateway::start(short);
    // The host does not read, so the pipe keeps what is sent.
    gateway.fake("stop reading");
    gateway.send(&interrupt("s1", "i1"));
    gateway.send(&turn("s1", "t1", "x"));
    // The supervisor answers these itself: by the second one what came before was written.
    for id in ["long1", "long2"] {
        let answer = gateway.ask(&json!({"type": "x", "request_id": id, "y": "y".repeat(2_000)}));
        assert_eq!(answer["code"], "frame_too_large");
    }
    let pid = gateway.host_pid(1);
    kill(pid);
    assert_eq!(gateway.answer("i1")["type"], "error");
    // Its frame was written into the pipe: nobody can be certain that nothing ran.
    assert_eq!(gateway.answer("t1")["execution_state"], "unknown");
}

#[test]
fn a_turn_of_which_no_byte_was_written_has_not_started() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    gateway.fake("stop reading");
    let filler =
        json!({"type": "control", "sid": "s", "request_id": "c", "x": "x".repeat(2 << 20)});
    gateway.send(&filler);
    gateway.send(&turn("s1", "t1", "x"));
    // The supervisor answers this one itself, so it has read what came before.
    let too_long = format!(
        "{{\"type\":\"x\",\"request_id\":\"long\",\"y\":\"{}\"}}\n",
        "y".repeat(33 << 20)
    );
    gateway.send_raw(too_long.as_bytes());
    assert_eq!(gateway.answer("long")["code"], "frame_too_large");
    kill(gateway.host_pid(1));
    let terminal = gateway.answer("t1");
    assert_eq!(terminal["execution_state"], "not_started");
    assert_eq!(terminal["reason"], "crash");
}

#[test]
fn kept_frames_go_to_the_next_host_in_order() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    gateway.fake("abort");
    gateway.wait_kind("host.exited", 1);
    gateway.send(&turn("s1", "t1", "x"));
    gateway.send(&json!({"type": "control", "sid": "s1", "request_id": "c1", "route_name": "r"}));
    gateway.send_raw(
        b"{\"type\":\"no.such\",  \"request_id\":\"n1\",\"big\":123456789012345678901234567890}\n",
    );
    let started = std::time::Instant::now();
    let probe = gateway.ask(&json!({"type": "idle.probe", "request_id": "p1"}));
    assert_eq!(probe["idle"], json!(null), "not idle while no host runs");
    gateway.answer("c1");
    let untouched = gateway.answer("n1");
    assert_eq!(
        untouched["line"],
        "{\"type\":\"no.such\",  \"request_id\":\"n1\",\"big\":123456789012345678901234567890}"
    );
    assert!(started.elapsed().as_millis() < 20_000);
    let order: Vec<_> = gateway
        .frames()
        .into_iter()
        .filter_map(|frame| frame["request_id"].as_str().map(str::to_owned))
        .collect();
    let at = |id: &str| order.iter().position(|other| other == id);
    assert!(
        at("p1") < at("t1") && at("t1") < at("c1") && at("c1") < at("n1"),
        "{order:?}"
    );
}

#[test]
fn an_interrupt_ends_a_kept_turn_and_starts_no_host() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]).args(["--respawn-max", "1"]));
    gateway.fake("abort");
    gateway.wait_kind("host.exited", 1);
    let mut kept = turn("s1", "t1", "x");
    kept["session_key"] = json!("key");
    kept["history_version"] = json!(7);
    gateway.send(&kept);
    gateway.send(&turn("s2", "t2", "x"));
    let ack = gateway.ask(&interrupt("s1", "i1"));
    let nothing = gateway.ask(&interrupt("s3", "i2"));
    let end = gateway.answer("t1");
    assert_eq!(
        (&end["type"], &end["interrupted"]),
        (&json!("turn.end"), &json!(true))
    );
    assert_eq!(
        (&end["session_key"], &end["history_version"]),
        (&json!("key"), &json!(7))
    );
    assert_eq!(
        (&ack["type"], &ack["applied"]),
        (&json!("interrupt.ack"), &json!(true))
    );
    assert!(ack["applied_ns"].is_u64());
    assert_eq!(nothing["applied"], false);
    assert_eq!(gateway.answer("t2")["type"], "turn.end");
    // Given up: an interrupt still answers, and starts nothing.
    gateway.fake("abort");
    gateway.wait_kind("host.gave_up", 1);
    assert_eq!(gateway.ask(&interrupt("s1", "i3"))["applied"], false);
    let refused = gateway.ask(&turn("s1", "t3", "x"));
    assert_eq!(
        (&refused["reason"], &refused["execution_state"]),
        (&json!("crash"), &json!("not_started"))
    );
    assert_eq!(gateway.frames_of_kind("hello").len(), 2);
}

#[test]
fn more_than_a_thousand_kept_frames_are_capacity() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    gateway.fake("abort");
    gateway.wait_kind("host.exited", 1);
    let mut all = String::new();
    for number in 0..1030 {
        all.push_str(&format!(
            "{}\n",
            turn(&format!("s{number}"), &format!("t{number}"), "x")
        ));
    }
    gateway.send_raw(all.as_bytes());
    let refused = gateway.answer("t1024");
    assert_eq!(
        (&refused["reason"], &refused["code"]),
        (&json!("capacity"), &json!(5019))
    );
    assert_eq!(refused["execution_state"], "not_started");
    assert!(refused["retry_after_ms"].is_u64());
    assert_eq!(gateway.answer("t1029")["reason"], "capacity");
    for number in [0, 1, 1023] {
        assert_eq!(gateway.answer(&format!("t{number}"))["type"], "turn.end");
    }
}

#[test]
fn an_error_for_a_turn_becomes_its_turn_error() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    let terminal = gateway.ask(&turn("s1", "t1", "refuse"));
    assert_eq!(
        (&terminal["type"], &terminal["message"]),
        (&json!("turn.error"), &json!("refused"))
    );
    assert_eq!(gateway.frames_of_kind("error").len(), 0);
}

#[test]
fn a_second_terminal_frame_is_dropped() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    gateway.send(&turn("s1", "t1", "twice"));
    gateway.ask(&turn("s1", "t2", "x"));
    let of_first = gateway
        .frames()
        .into_iter()
        .filter(|frame| frame["request_id"] == "t1" && frame["type"] != "turn.accepted");
    assert_eq!(of_first.count(), 1);
}

#[test]
fn whole_lines_are_relayed_and_a_cut_one_is_dropped() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    gateway.send(&json!({"type": "fake", "do": "raw",
        "text": "no frame\n[1]\n{\"no\":\"type\"}\n{\"type\":\"last\"}\n{\"type\":\"cu"}));
    gateway.fake("abort");
    gateway.wait_kind("last", 1);
    gateway.wait_kind("hello", 2);
    let kinds: Vec<_> = gateway
        .frames()
        .iter()
        .map(|frame| frame["type"].clone())
        .collect();
    assert_eq!(kinds, ["hello", "last", "host.exited", "hello"]);
    gateway.wait_stderr("a line that is no frame: [1]");
}

#[test]
fn what_cannot_be_parsed_reaches_the_host_untouched() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    gateway.send_raw(b"{\"type\":  broken \\ud800 1e999\r\n");
    let answer = gateway.wait_kind("error", 1);
    assert_eq!(answer["line"], "{\"type\":  broken \\ud800 1e999");
}

#[test]
fn all_output_before_an_exit_arrives_although_a_grandchild_holds_the_pipe() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    gateway.send(&json!({"type": "fake", "do": "grandchild", "own_session": true}));
    let grandchild = gateway.wait_kind("fake.child", 1)["pid"].as_i64().unwrap();
    gateway
        .send(&json!({"type": "fake", "do": "flood", "count": 2000, "frame": {"type": "flood"}}));
    gateway.fake("exit");
    gateway.wait_kind("hello", 2);
    assert_eq!(gateway.frames_of_kind("flood").len(), 2000);
    let grandchild = i32::try_from(grandchild).unwrap();
    assert!(
        turnhost_tests::gateway::lives(grandchild),
        "it left the host's session"
    );
    kill(grandchild);
}

#[test]
fn a_shutdown_frame_ends_host_and_supervisor() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    let pid = gateway.host_pid(1);
    gateway.send(&turn("s1", "t1", "hang"));
    let ack = gateway.ask(&json!({"type": "shutdown", "request_id": "bye"}));
    assert_eq!(ack["type"], "shutdown.ack");
    assert_eq!(gateway.exit(), Exit::Code(0));
    let terminal = gateway.answer("t1");
    assert_eq!(terminal["reason"], "draining");
    assert!(
        gateway.frames_of_kind("host.exited").is_empty(),
        "it was asked for"
    );
    turnhost_tests::gateway::wait_gone(pid);
    assert_eq!(gateway.record(), None);
}

fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it runs");
}
