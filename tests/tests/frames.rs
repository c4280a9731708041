//! SPEC §3 and §4: the frames into the host and what each is answered, the frames out of it and
//! their fields.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::thread;
use std::time::Duration;

use serde_json::{Value, json};
use turnhost_protocol::process::monotonic_ns;
use turnhost_tests::{Frame, Host, Options, interrupt, probe, script_turn, turn};

fn two_workers() -> Options {
    Options::with_faults().args(["--workers", "2"])
}

fn held() -> Value {
    json!([{"delta": "held"}, {"sleep_ms": 3_600_000}])
}

fn stuck() -> Value {
    json!([{"delta": "stuck"}, {"stuck_ms": 3_600_000}])
}

fn close(sid: &str, request_id: &str) -> Value {
    json!({"type": "session.close", "sid": sid, "request_id": request_id})
}

fn is_hex32(value: &Value) -> bool {
    value.as_str().is_some_and(|text| {
        text.len() == 32
            && text
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    })
}

#[test]
fn hello_says_who_the_host_is() {
    let host = Host::start(
        Options::new()
            .args(["--build-sha", "abc123", "--workers", "3"])
            .env("HERMES_HOME", "/nowhere/hermes"),
    );
    let hello = host.hello();
    assert_eq!(hello["host_pid"], host.child_pid().as_raw_nonzero().get());
    assert!(is_hex32(&hello["boot_id"]), "{}", hello.line());
    assert_eq!(hello["build_sha"], "abc123");
    assert!(hello["version"].as_str().is_some_and(|v| !v.is_empty()));
    let cwd = std::env::current_dir().expect("a current folder");
    assert_eq!(hello["cwd"], cwd.to_str().expect("a path in UTF-8"));
    assert_eq!(hello["hermes_home"], "/nowhere/hermes");
    assert_eq!(hello["home"], host.home().to_str().expect("UTF-8"));
    assert_eq!(hello["protocol_version"], 1);
    assert_eq!(hello["workers"], 3);
    assert_eq!(hello["heartbeat_secs"], 0.0);
    let capabilities = hello["capabilities"].as_array().expect("a list");
    for kind in [
        "turn.start",
        "interrupt",
        "session.close",
        "idle.probe",
        "shutdown",
    ] {
        assert!(capabilities.contains(&json!(kind)), "{kind} is missing");
    }

    let plain = Host::start(Options::new());
    assert_eq!(plain.hello()["build_sha"], "unknown");
    assert_eq!(plain.hello()["hermes_home"], "");
    assert_ne!(plain.hello()["boot_id"], hello["boot_id"]);
    assert!(host.hello().host_ns() <= monotonic_ns());
}

#[test]
fn hello_ack_takes_no_answer() {
    let host = Host::start(Options::new());
    host.send(
        &json!({"type": "hello.ack", "protocol_version": 1, "boot_id": "x",
                      "request_id": "r"}),
    );
    host.ask(&probe("next"));
    assert_eq!(host.frames().len(), 2);
}

#[test]
fn heartbeats_count_what_the_host_does() {
    let host = Host::start(two_workers().heartbeat_secs("1"));
    assert_eq!(host.hello()["heartbeat_secs"], 1.0);
    host.ask(&turn("idle", "done", "x"));
    for sid in ["a", "b"] {
        host.send(&script_turn(sid, sid, &stuck()));
        host.wait_started(sid);
    }
    host.send(&turn("c", "c", "x"));
    // Both workers are stuck and the beat goes on.
    let beat = host.wait_for("a beat that counts the queued turn", |frame| {
        frame.kind() == "hb" && frame["queued_turns"] == 1
    });
    assert_eq!(beat["active_turns"], 2);
    assert_eq!(beat["waiting_turns"], 0);
    assert_eq!(beat["open_requests"], 0);
    assert_eq!(beat["sessions"], 4);
    assert_eq!(beat["progress_counter"], 1);
    assert!(beat["rss_mb"].as_f64().is_some_and(|mb| mb > 0.5));
    let mut times = Vec::new();
    host.find("three beats", |frame| {
        if frame.kind() == "hb" {
            times.push(frame.host_ns());
        }
        (times.len() == 3).then_some(())
    });
    for pair in times.windows(2) {
        let gap = pair[1] - pair[0];
        assert!(gap > 900_000_000, "beats come each second: {times:?}");
    }
}

#[test]
fn heartbeats_can_be_turned_off_and_wait_one_at_a_time() {
    let host = Host::start(Options::new());
    host.stop_reading();
    host.wait_quiet();
    host.read_on();
    host.ask(&probe("r"));
    assert!(host.frames().iter().all(|frame| frame.kind() != "hb"));

    // Two floods fill the pipe; the beats that nobody reads are not kept.
    let host = Host::start(Options::new().heartbeat_secs("0.05"));
    host.stop_reading();
    let flood = json!([{"deltas": {"count": 100_000, "text": "0123456789"}}]);
    host.send(&script_turn("s", "r", &flood));
    let start = monotonic_ns();
    // Time itself is the subject: the pipe is full after a moment, then beats pass unread.
    thread::sleep(Duration::from_secs(2));
    let resumed = monotonic_ns();
    host.read_on();
    host.answer("r");
    let unread: Vec<u64> = host
        .frames()
        .iter()
        .filter(|frame| frame.kind() == "hb")
        .map(|frame| frame.host_ns())
        .filter(|ns| (start + 1_000_000_000..resumed).contains(ns))
        .collect();
    assert!(unread.len() <= 1, "at most one heartbeat waits: {unread:?}");
}

#[test]
fn a_turn_tells_its_story_in_order() {
    let host = Host::start(Options::new());
    let before = monotonic_ns();
    let end = host.ask(&turn("s", "r", "hello big world"));
    let mut story = host.story("s");
    // The session is built for its first turn, and may say so.
    let started = story.iter().position(|kind| kind == "turn.started");
    let built = story[..started.expect("it started")]
        .iter()
        .filter(|kind| *kind == "session.info")
        .count();
    assert!(built <= 1);
    story.retain(|kind| kind != "message.delta");
    story.drain(1..=built);
    assert_eq!(
        story,
        [
            "turn.accepted",
            "turn.started",
            "message.start",
            "message.complete",
            "session.info",
            "turn.end"
        ]
    );
    let frames = host.frames_of("s");
    assert!(frames[0]["queued_turns"].is_u64());
    let started = host.wait_started("r");
    let started_ns = started["started_ns"].as_u64().expect("a time");
    assert!((before..=started.host_ns()).contains(&started_ns));
    assert!(host.wait_event("s", "message.start").payload().is_null());

    let deltas: String = frames
        .iter()
        .filter(|frame| frame.event() == Some("message.delta"))
        .map(|frame| frame.payload()["text"].as_str().expect("a text"))
        .collect();
    assert_eq!(deltas, "hello big world", "without steps it echoes");
    let complete = host.wait_event("s", "message.complete");
    assert_eq!(complete.payload()["text"], "hello big world");
    assert_eq!(complete.payload()["status"], "complete");
    assert!(complete.payload()["usage"].is_object());

    assert_eq!(end["session_key"], "s");
    assert_eq!(end["history_version"], 1);
    assert_eq!(end["message_count"], 2);
    assert_eq!(end["interrupted"], false);
    assert_eq!(end["session_info_emitted"], true);
    assert!(end["usage"].is_object());
    let ended_ns = end["ended_ns"].as_u64().expect("a time");
    assert!((started_ns..=end.host_ns()).contains(&ended_ns));
    let info = host
        .frames_of("s")
        .iter()
        .rfind(|frame| frame.event() == Some("session.info"))
        .map(|frame| frame.payload().clone())
        .expect("it was sent");
    for (name, info) in [("session.info", &info), ("turn.end", &end["session_info"])] {
        for field in [
            "model",
            "cwd",
            "running",
            "title",
            "stored_session_id",
            "usage",
            "personality",
            "tools",
            "mcp_servers",
            "profile_name",
            "version",
        ] {
            assert!(!info[field].is_null(), "{name} has no {field}");
        }
        assert_eq!(info["stored_session_id"], "s");
        assert_eq!(info["running"], false);
    }

    let second = host.ask(&turn("s", "r2", "x"));
    assert_eq!(second["history_version"], 2);
    assert_eq!(second["message_count"], 4);
}

#[test]
fn a_prompt_may_come_in_parts() {
    let host = Host::start(Options::new());
    let end = host.ask(&json!({
        "type": "turn.start", "sid": "s", "request_id": "r",
        "prompt": [{"type": "text", "text": "from "}, {"type": "image_url"}, {"text": "parts"}],
    }));
    assert_eq!(end.kind(), "turn.end");
    let complete = host.wait_event("s", "message.complete");
    assert_eq!(complete.payload()["text"], "from \nparts");
}

fn activities(host: &Host, sid: &str, count: usize) -> Vec<Value> {
    let mut seen = Vec::new();
    host.find(&format!("{count} activity frames of {sid}"), |frame| {
        let message = &frame["message"];
        if frame.sid() == Some(sid) && message["method"] == "compute_host.activity" {
            seen.push(message["params"].clone());
        }
        (seen.len() == count).then_some(())
    });
    seen
}

#[test]
fn activity_tells_when_the_agent_last_made_progress() {
    let host = Host::start(Options::with_faults());
    let mut moved = script_turn("moved", "r", &stuck());
    moved["turn_id"] = json!("turn-1");
    let before = monotonic_ns();
    host.send(&moved);
    let delta = host.wait_event("moved", "message.delta");
    let mut silent = script_turn("silent", "r2", &json!([{"sleep_ms": 3_600_000}]));
    silent["turn_id"] = json!("turn-2");
    host.send(&silent);
    // Without a turn_id nothing is told.
    host.send(&script_turn("untold", "r3", &held()));

    let activity = activities(&host, "moved", 2);
    for params in &activity {
        assert_eq!(params["session_id"], "moved");
        assert_eq!(params["turn_id"], "turn-1");
        let ns = params["activity_ns"].as_u64().expect("it made progress");
        assert!(
            (before..=delta.host_ns()).contains(&ns),
            "the time of the delta, not of the report"
        );
    }
    assert_eq!(activity[0], activity[1]);
    for params in activities(&host, "silent", 2) {
        assert!(params["activity_ns"].is_null(), "{params}");
    }
    host.ask(&interrupt("silent", "i"));
    host.answer("r2");
    assert!(
        host.frames_of("untold")
            .iter()
            .all(|frame| frame.kind() != "rpc" || frame.event().is_some())
    );
}

#[test]
fn an_idle_probe_names_the_work() {
    let host = Host::start(two_workers());
    let probe_idle = |id: &str| {
        let verdict = host.ask(&json!({"type": "idle.probe", "request_id": id}));
        assert_eq!(verdict.kind(), "idle.verdict");
        let mut fields = verdict.value().clone();
        let fields = fields.as_object_mut().expect("an object");
        for name in ["type", "request_id", "host_ns"] {
            fields.remove(name);
        }
        Value::Object(fields.clone())
    };
    assert_eq!(probe_idle("1"), json!({"idle": true, "reason": null}));
    host.ask(&turn("s", "r", "x"));
    assert_eq!(probe_idle("2"), json!({"idle": true, "reason": null}));
    host.send(&script_turn("a", "a", &held()));
    host.wait_started("a");
    assert_eq!(
        probe_idle("3"),
        json!({"idle": false, "reason": "turn_in_flight", "detail": "session:a"})
    );
    // A queued prompt and a turn that is still unwinding are work.
    host.send(&script_turn("b", "b", &stuck()));
    host.wait_started("b");
    host.send(&turn("c", "c", "x"));
    host.wait_for("turn.accepted", |frame| frame.answers("c"));
    let verdict = probe_idle("4");
    assert_eq!(verdict["reason"], "turn_in_flight");
    let detail = verdict["detail"].as_str().expect("a detail");
    let sids = detail.strip_prefix("session:").expect("the sessions");
    for sid in ["a", "b", "c"] {
        assert!(sids.split([',', ' ']).any(|name| name == sid), "{detail}");
    }
    host.ask(&interrupt("a", "i"));
    host.answer("c");
    host.ask(&interrupt("b", "i2"));
    assert_eq!(
        probe_idle("5"),
        json!({"idle": false, "reason": "turn_in_flight", "detail": "session:b"})
    );
}

fn live_sids(host: &Host, request_id: &str) -> Vec<String> {
    let list = host.ask(&json!({"type": "session.list", "request_id": request_id}));
    assert_eq!(list.kind(), "session.list.ack");
    let mut sids: Vec<String> = list["sessions"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|session| session["sid"].as_str().map(str::to_owned))
        .collect();
    sids.sort();
    sids
}

#[test]
fn sessions_are_listed() {
    let host = Host::start(Options::new());
    assert!(live_sids(&host, "none").is_empty());
    let mut named = turn("a", "r", "x");
    named["session_key"] = json!("key");
    host.ask(&named);
    host.send(&script_turn("b", "r2", &held()));
    host.wait_started("r2");
    assert_eq!(live_sids(&host, "both"), ["a", "b"]);
    let list = host.ask(&json!({"type": "session.list", "request_id": "l"}));
    let sessions = list["sessions"].as_array().expect("a list");
    let of = |sid: &str| {
        sessions
            .iter()
            .find(|session| session["sid"] == sid)
            .expect("it is listed")
    };
    assert_eq!(of("a")["session_key"], "key");
    assert_eq!(of("a")["message_count"], 2);
    assert_eq!(of("b")["session_key"], "b");
    for sid in ["a", "b"] {
        assert!(of(sid)["state"].is_string(), "{}", of(sid));
        // Seconds since 1970: this century's.
        let active = of(sid)["last_active"].as_f64().expect("a time");
        assert!(active > 1.7e9, "{active}");
    }
}

#[test]
fn closing_a_session_finalizes_it_and_takes_it_out_of_memory() {
    let mut host = Host::start(Options::new());
    host.ask(&turn("s", "r", "x"));
    let ack = host.ask(&close("s", "c"));
    assert_eq!((ack.kind(), ack.sid()), ("session.close.ack", Some("s")));
    assert!(live_sids(&host, "l").is_empty());
    // It is unknown from then on, and its name is free.
    for sid in ["s", "never"] {
        let error = host.ask(&close(sid, &format!("again {sid}")));
        assert_eq!(
            (error.kind(), &error["message"], &error["code"]),
            ("error", &json!("session not found"), &json!("not_found"))
        );
    }
    assert_eq!(host.ask(&turn("s", "r2", "x")).kind(), "turn.end");
    host.close_stdin();
    host.exit();
    let finalized = host.finalized();
    assert_eq!(finalized.len(), 2, "each of the two once: {finalized:?}");
    assert!(finalized.iter().all(|(sid, _)| sid == "s"));
}

#[test]
fn closing_a_session_interrupts_its_turn_first() {
    let host = Host::start(two_workers());
    host.send(&script_turn("s", "r", &held()));
    host.wait_started("r");
    let ack = host.ask(&close("s", "c"));
    assert_eq!(ack.kind(), "session.close.ack");
    let end = host.answer("r");
    assert_eq!(
        (end.kind(), &end["interrupted"]),
        ("turn.end", &json!(true))
    );
    let frames = host.frames_of("s");
    let place = |id: &str| frames.iter().rposition(|frame| frame.answers(id));
    assert!(place("r") < place("c"), "the ack comes after the end");
    // The same for a turn in the queue.
    for sid in ["a", "b"] {
        host.send(&script_turn(sid, sid, &held()));
        host.wait_started(sid);
    }
    host.send(&turn("q", "queued", "x"));
    assert_eq!(host.ask(&close("q", "c2")).kind(), "session.close.ack");
    assert_eq!(host.answer("queued")["interrupted"], true);
}

#[test]
fn closing_a_session_does_not_wait_for_a_stuck_turn() {
    let host = Host::start(two_workers());
    for sid in ["a", "b"] {
        host.send(&script_turn(sid, &format!("turn {sid}"), &stuck()));
        host.wait_started(&format!("turn {sid}"));
    }
    let before = monotonic_ns();
    for sid in ["a", "b"] {
        host.send(&close(sid, &format!("close {sid}")));
    }
    // Meanwhile others are served.
    host.ask(&probe("meanwhile"));
    for sid in ["a", "b"] {
        let ack = host.answer(&format!("close {sid}"));
        assert_eq!(ack.kind(), "session.close.ack");
        let took = ack.host_ns() - before;
        assert!(took < 6_000_000_000, "within 5 s: {took} ns");
        let error = host.answer(&format!("turn {sid}"));
        assert_eq!(error.kind(), "turn.error");
        assert_eq!(
            (&error["reason"], &error["execution_state"]),
            (&json!("exception"), &json!("unknown"))
        );
        assert!(error.host_ns() <= ack.host_ns());
    }
    assert!(live_sids(&host, "l").is_empty());
    // Both workers are lost in those turns; their places are not.
    assert_eq!(host.ask(&turn("next", "r", "x")).kind(), "turn.end");
}

#[test]
fn a_frame_without_a_handler_is_answered() {
    let host = Host::start(Options::new());
    let check = |mut frame: Value, kind: &str, code: Value| {
        let id = frame["type"].as_str().expect("a type").to_owned();
        frame["request_id"] = json!(id);
        let answer = host.ask(&frame);
        assert_eq!((answer.kind(), &answer["code"]), (kind, &code));
        let message = answer["message"].as_str().unwrap_or_default();
        assert!(
            message.contains("not supported by this version"),
            "{id}: {message}"
        );
        assert_eq!(host.frames_with_id(&id).len(), 1);
    };
    let control = json!({"type": "control", "sid": "s", "route_name": "session.save"});
    check(control, "control.error", Value::Null);
    let reload = json!({"type": "reload_mcp", "sid": "s"});
    check(reload, "control.error", Value::Null);
    let respond = json!({"type": "respond", "sid": "s", "params": {"frame": {"id": "x"}}});
    check(respond, "respond.error", Value::Null);
    let lock = json!({"type": "clarify.lock", "sid": "s", "params": {}});
    check(lock, "respond.error", Value::Null);
    check(
        json!({"type": "requests.open"}),
        "error",
        json!("unsupported"),
    );
    let resume = json!({"type": "session.resume", "sid": "s", "session_key": "k"});
    check(resume, "error", json!("unsupported"));
}

#[test]
fn shutdown_is_answered_before_the_drain() {
    let mut host = Host::start(Options::new());
    let ack = host.ask(&json!({"type": "shutdown", "request_id": "bye"}));
    assert_eq!(ack.kind(), "shutdown.ack");
    host.wait_end();
    assert!(
        host.frames()
            .last()
            .is_some_and(|frame| frame.answers("bye"))
    );
}

#[test]
fn a_folder_whose_name_is_no_utf8_is_shown_with_replacements() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let cwd = folder.path().join(OsStr::from_bytes(b"caf\xe9"));
    std::fs::create_dir(&cwd).expect("a folder");
    let host = Host::start(Options::new().cwd(cwd));
    let is_shown = |cwd: &Value| {
        cwd.as_str()
            .is_some_and(|cwd| cwd.ends_with("/caf\u{fffd}"))
    };
    let hello = host.hello();
    assert!(is_shown(&hello["cwd"]), "{}", hello.line());
    let end = host.ask(&turn("s", "r", "x"));
    assert_eq!(end.kind(), "turn.end", "{}", end.line());
    assert!(is_shown(&end["session_info"]["cwd"]), "{}", end.line());
    let info = host.wait_event("s", "session.info");
    assert!(is_shown(&info.payload()["cwd"]), "{}", info.line());
}

#[test]
fn the_last_of_equal_keys_wins_inside_a_field_too() {
    let host = Host::start(Options::new());
    host.send_line(concat!(
        r#"{"type":"turn.start","sid":"s","request_id":"r","#,
        r#""prompt":[{"type":"text","text":"first","text":"last"},{"text":7,"text":"again"}],"#,
        r#""active_session_lease":{"lease_id":7,"session_id":"a","session_id":"b","lease_id":"l"}}"#,
    ));
    let end = host.answer("r");
    assert_eq!(end.kind(), "turn.end", "{}", end.line());
    let complete = host.wait_event("s", "message.complete");
    assert_eq!(complete.payload()["text"], "last\nagain");
    // The last one decides also where it is the wrong one.
    host.send_line(concat!(
        r#"{"type":"turn.start","sid":"s","request_id":"r2","text":"x","#,
        r#""active_session_lease":{"lease_id":"l","session_id":"a","lease_id":7}}"#,
    ));
    let refused = host.answer("r2");
    assert_eq!(
        (refused.kind(), &refused["reason"]),
        ("turn.error", &json!("invalid")),
        "{}",
        refused.line()
    );
}

#[test]
fn many_sessions_fit_into_short_lines() {
    const SESSIONS: usize = 100;
    // The harness holds each line against the limit.
    let host = Host::start(two_workers().max_frame_bytes(1024));
    for number in 0..SESSIONS {
        let name = format!("session {number}");
        host.send(&script_turn(&name, &name, &held()));
    }
    host.wait_for("the last turn's acceptance", |frame| {
        frame.answers(&format!("session {}", SESSIONS - 1))
    });
    let verdict = host.ask(&json!({"type": "idle.probe", "request_id": "busy"}));
    assert_eq!(
        (verdict.kind(), &verdict["reason"]),
        ("idle.verdict", &json!("turn_in_flight"))
    );
    assert_eq!(verdict["idle"], false);
    let detail = verdict["detail"].as_str().unwrap_or_default();
    assert!(detail.starts_with("session:session "), "{detail}");
    let list = host.ask(&json!({"type": "session.list", "request_id": "list"}));
    assert_eq!(
        (list.kind(), &list["truncated"]),
        ("session.list.ack", &json!(true))
    );
    let listed = list["sessions"].as_array().expect("a list");
    assert!((1..SESSIONS).contains(&listed.len()), "{}", listed.len());
    assert!(
        listed
            .iter()
            .all(|session| session["session_key"].is_string())
    );
}

#[test]
fn the_highest_history_version_is_not_passed() {
    let host = Host::start(Options::new());
    let mut frame = turn("s", "r", "x");
    frame["history"] = json!([{"role": "user", "content": "before"}]);
    frame["history_version"] = json!(u64::MAX);
    let end = host.ask(&frame);
    assert_eq!(
        (end.kind(), &end["history_version"], &end["message_count"]),
        ("turn.end", &json!(u64::MAX), &json!(3)),
        "{}",
        end.line()
    );
    assert_eq!(host.ask(&turn("s", "r2", "x"))["message_count"], 5);
    assert_eq!(host.ask(&turn("other", "r3", "x")).kind(), "turn.end");
}

#[test]
fn activity_is_told_between_the_start_of_its_turn_and_the_end() {
    let host = Host::start(Options::new());
    host.stop_reading();
    let flood = json!([{"deltas": {"count": 1_000_000, "text": "0123456789"}}]);
    host.send(&script_turn("flood", "flood", &flood));
    let sids = ["a", "b", "c"];
    for sid in sids {
        // Some output of the same session is unread as well.
        let steps = json!([{"deltas": {"count": 1000, "text": "0123456789"}}]);
        host.send(&script_turn(sid, &format!("first {sid}"), &steps));
        host.wait_quiet();
        let mut told = script_turn(sid, sid, &held());
        told["turn_id"] = json!(sid);
        host.send(&told);
    }
    // Time itself is the subject: activity is told once a second.
    thread::sleep(Duration::from_millis(2_200));
    // Two are interrupted while nothing is read, the third when it was heard of.
    for sid in ["a", "b"] {
        host.send(&interrupt(sid, &format!("i {sid}")));
    }
    host.wait_quiet();
    host.read_on();
    activities(&host, "c", 1);
    host.send(&interrupt("c", "i c"));
    for sid in sids {
        assert_eq!(host.answer(sid)["interrupted"], true);
    }
    // What would come too late comes now.
    host.ask(&interrupt("flood", "i"));
    host.answer("flood");
    for sid in sids {
        let frames = host.frames_of(sid);
        let places = |is: &dyn Fn(&Frame) -> bool| -> Vec<usize> {
            (0..frames.len())
                .filter(|place| is(&frames[*place]))
                .collect()
        };
        let started = places(&|frame| frame.kind() == "turn.started" && frame.answers(sid));
        let end = places(&|frame| frame.is_terminal() && frame.answers(sid));
        assert_eq!((started.len(), end.len()), (1, 1), "{sid}");
        let told =
            places(&|frame| frame.kind() == "rpc" && frame["message"]["params"]["turn_id"] == sid);
        assert!(
            told.iter()
                .all(|place| (started[0]..end[0]).contains(place)),
            "{sid}: {told:?} between {started:?} and {end:?}"
        );
    }
}
