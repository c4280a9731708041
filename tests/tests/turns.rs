//! SPEC §5, points 1 to 5: a turn's life, from the reader's first check to its terminal frame.

use std::collections::HashMap;

use serde_json::{Value, json};
use turnhost_tests::{Frame, Host, Options, interrupt, probe, script_turn, turn};

/// Steps that hold a worker until an interrupt.
fn held() -> Value {
    json!([{"delta": "held"}, {"sleep_ms": 3_600_000}])
}

/// Steps that hold a worker whatever comes.
fn stuck() -> Value {
    json!([{"delta": "stuck"}, {"stuck_ms": 3_600_000}])
}

fn two_workers() -> Options {
    Options::with_faults().args(["--workers", "2"])
}

/// Starts turns that hold both workers of a host, and waits until they do.
fn hold_both(host: &Host, steps: &Value) {
    for sid in ["hold1", "hold2"] {
        host.send(&script_turn(sid, sid, steps));
        host.wait_started(sid);
    }
}

/// Checks a refusal: its reason, that no part of the turn ran, and a part of its message.
fn check_refused(answer: &Frame, reason: &str, message: &str) {
    assert_eq!(answer.kind(), "turn.error", "{}", answer.line());
    assert_eq!(answer["reason"], reason, "{}", answer.line());
    assert_eq!(answer["execution_state"], "not_started");
    let said = answer["message"].as_str().unwrap_or_default();
    assert!(said.contains(message), "{said:?} has no {message:?}");
}

/// Checks that a turn ended as interrupted without having run.
fn check_never_ran(host: &Host, sid: &str, request_id: &str) {
    let end = host.answer(request_id);
    assert_eq!(
        (end.kind(), &end["interrupted"]),
        ("turn.end", &json!(true)),
        "{}",
        end.line()
    );
    let frames = host.frames_of(sid);
    let accepted = frames
        .iter()
        .position(|frame| frame.answers(request_id))
        .expect("it has an end");
    let kinds: Vec<&str> = frames[accepted..]
        .iter()
        .take_while(|frame| frame.host_ns() <= end.host_ns())
        .filter(|frame| frame.kind() != "interrupt.ack")
        .map(|frame| frame.event().unwrap_or(frame.kind()))
        .collect();
    assert_eq!(kinds, ["turn.accepted", "session.info", "turn.end"]);
}

#[test]
fn a_turn_needs_a_sid() {
    let host = Host::start(Options::new());
    let frame = json!({"type": "turn.start", "request_id": "r", "text": "x"});
    check_refused(&host.ask(&frame), "invalid", "sid required");
    let frame = json!({"type": "turn.start", "sid": "", "request_id": "r2", "text": "x"});
    check_refused(&host.ask(&frame), "invalid", "sid required");
    assert_eq!(host.ask(&turn("s", "r3", "x")).kind(), "turn.end");
}

#[test]
fn a_session_has_one_turn_at_a_time() {
    let host = Host::start(two_workers());
    host.send(&script_turn("s", "first", &held()));
    host.wait_started("first");
    check_refused(&host.ask(&turn("s", "second", "x")), "busy", "session busy");
    // A queued turn counts as well.
    host.send(&script_turn("t", "t", &held()));
    host.wait_started("t");
    host.send(&turn("queued", "waits", "x"));
    let accepted = host.wait_for("turn.accepted", |frame| {
        frame.kind() == "turn.accepted" && frame.answers("waits")
    });
    assert_eq!(accepted["queued_turns"], 1);
    check_refused(
        &host.ask(&turn("queued", "too many", "x")),
        "busy",
        "session busy",
    );
    host.ask(&interrupt("s", "i"));
    assert_eq!(host.answer("first")["interrupted"], true);
    assert_eq!(host.answer("waits")["interrupted"], false);
    assert_eq!(host.ask(&turn("s", "third", "x")).kind(), "turn.end");
}

#[test]
fn a_request_id_is_live_once() {
    let host = Host::start(Options::new());
    host.send(&script_turn("s", "same", &held()));
    host.wait_started("same");
    host.send(&turn("other", "same", "x"));
    check_refused(&host.answer("same"), "invalid", "request_id");
    host.ask(&interrupt("s", "i"));
    host.wait_for("the end of the first", |frame| {
        frame.kind() == "turn.end" && frame.answers("same")
    });
    host.send(&turn("other", "same", "x"));
    host.wait_for("the end of a later one", |frame| {
        frame.kind() == "turn.end" && frame.sid() == Some("other")
    });
}

#[test]
fn a_key_is_live_under_one_busy_sid() {
    let host = Host::start(Options::new());
    let with_key = |sid: &str, id: &str, steps: &Value| {
        let mut frame = script_turn(sid, id, steps);
        frame["session_key"] = json!("k");
        frame
    };
    host.send(&with_key("a", "first", &held()));
    host.wait_started("first");
    let short = json!([{"say": "x"}]);
    check_refused(&host.ask(&with_key("b", "second", &short)), "busy", "");
    host.ask(&interrupt("a", "i"));
    assert_eq!(host.answer("first")["interrupted"], true);
    assert_eq!(host.ask(&with_key("b", "third", &short)).kind(), "turn.end");
}

#[test]
fn a_key_moves_to_a_new_sid_and_a_sid_takes_a_new_key() {
    let host = Host::start(Options::new());
    let run = |sid: &str, key: &str, id: &str| {
        let mut frame = turn(sid, id, "x");
        frame["session_key"] = json!(key);
        let end = host.ask(&frame);
        assert_eq!(end.kind(), "turn.end", "{}", end.line());
        assert_eq!(end["session_key"], key);
        (end["history_version"].clone(), end["message_count"].clone())
    };
    assert_eq!(run("a", "k", "1"), (json!(1), json!(2)));
    assert_eq!(run("a", "k", "2"), (json!(2), json!(4)));
    // A window came back under a new sid: the conversation goes on.
    assert_eq!(run("b", "k", "3"), (json!(3), json!(6)));
    assert_eq!(
        host.ask(&interrupt("a", "i"))["applied"],
        false,
        "the old sid is gone"
    );
    // The sid is bound to another conversation, which starts empty.
    assert_eq!(run("b", "k2", "4"), (json!(1), json!(2)));
    assert_eq!(run("b", "k2", "5"), (json!(2), json!(4)));
    let list = host.ask(&json!({"type": "session.list", "request_id": "l"}));
    let live: Vec<_> = list["sessions"]
        .as_array()
        .expect("a list")
        .iter()
        .filter(|session| session["sid"] == "b")
        .map(|session| session["session_key"].clone())
        .collect();
    assert_eq!(live, [json!("k2")]);
}

#[test]
fn more_turns_than_may_wait_are_refused_with_a_time() {
    let host = Host::start(two_workers().args(["--max-queued-turns", "3"]));
    hold_both(&host, &held());
    for number in 1..=3 {
        let id = format!("q{number}");
        host.send(&turn(&id, &id, "x"));
        let accepted = host.wait_for("turn.accepted", |frame| {
            frame.kind() == "turn.accepted" && frame.answers(&id)
        });
        assert_eq!(accepted["queued_turns"], number);
    }
    let refused = host.ask(&turn("q4", "q4", "x"));
    check_refused(&refused, "capacity", "");
    assert_eq!(refused["code"], 5019);
    assert!(
        refused["retry_after_ms"].as_u64().is_some_and(|ms| ms > 0),
        "{}",
        refused.line()
    );
    // A place that is given back can be taken.
    host.ask(&interrupt("q2", "i"));
    check_never_ran(&host, "q2", "q2");
    host.send(&turn("q5", "q5", "x"));
    host.ask(&interrupt("hold1", "i1"));
    for id in ["q1", "q3", "q5"] {
        assert_eq!(host.answer(id)["interrupted"], false);
    }
}

#[test]
fn a_turn_of_a_lower_generation_does_not_run() {
    let host = Host::start(Options::new());
    let with_generation = |mut frame: Value, generation: i64| {
        frame["queued_prompt_generation"] = json!(generation);
        frame
    };
    let run =
        |id: &str, generation: i64| host.ask(&with_generation(turn("s", id, "x"), generation));
    assert_eq!(run("adopts 5", 5)["interrupted"], false);
    run("below 5", 4);
    check_never_ran(&host, "s", "below 5");
    assert_eq!(run("equals 5", 5)["interrupted"], false);
    // An interrupt that carries one raises it.
    host.ask(&with_generation(interrupt("s", "i1"), 7));
    run("below 7", 6);
    check_never_ran(&host, "s", "below 7");
    // A bare one does not.
    host.ask(&interrupt("s", "i2"));
    assert_eq!(run("equals 7", 7)["interrupted"], false);
    // A turn that carries none runs.
    assert_eq!(host.ask(&turn("s", "none", "x"))["interrupted"], false);
    // Other sessions count for themselves.
    let other = with_generation(turn("other", "other", "x"), 1);
    assert_eq!(host.ask(&other)["interrupted"], false);
}

#[test]
fn an_interrupt_raises_the_generation_of_a_turn_in_the_queue() {
    let host = Host::start(two_workers());
    hold_both(&host, &held());
    let mut queued = turn("s", "queued", "x");
    queued["queued_prompt_generation"] = json!(1);
    host.send(&queued);
    let mut raise = interrupt("s", "i");
    raise["queued_prompt_generation"] = json!(2);
    assert_eq!(host.ask(&raise)["applied"], true);
    check_never_ran(&host, "s", "queued");
}

#[test]
fn the_number_of_workers_comes_from_the_flag_then_the_environment() {
    let own = "TURNHOST_WORKERS";
    let reference = "HERMES_TUI_RPC_POOL_WORKERS";
    let check = |flags: &[&str], env: &[(&str, &str)], expected: u64, warned: bool| {
        let mut options = Options::new().args(flags.iter().copied());
        for (name, value) in env {
            options = options.env(*name, *value);
        }
        let mut host = Host::start(options);
        assert_eq!(host.hello()["workers"], expected, "{flags:?} {env:?}");
        host.close_stdin();
        host.exit();
        let stderr = host.stderr();
        let names_value = env.iter().any(|(name, value)| {
            stderr
                .lines()
                .any(|line| line.contains("WARN") && line.contains(name) && line.contains(value))
        });
        assert_eq!(names_value, warned, "{flags:?} {env:?}: {stderr}");
    };
    check(&[], &[], 8, false);
    check(&[], &[(reference, "11")], 11, false);
    check(&[], &[(own, "3")], 3, false);
    check(&[], &[(own, "3"), (reference, "11")], 3, false);
    check(&["--workers", "5"], &[(own, "3")], 5, false);
    check(&[], &[(reference, "not-an-int")], 8, true);
    check(&[], &[(own, "4.5")], 8, true);
    check(&[], &[(own, "1")], 2, false);
    check(&[], &[(reference, "1")], 2, false);
    check(&["--workers", "2"], &[], 2, false);
}

#[test]
fn workers_bound_the_turns_that_compute() {
    let host = Host::start(two_workers());
    for number in 1..=5 {
        let id = format!("r{number}");
        host.send(&script_turn(&format!("s{number}"), &id, &held()));
    }
    host.wait_started("r1");
    host.wait_started("r2");
    host.wait_quiet();
    let started = || {
        host.frames()
            .iter()
            .filter(|frame| frame.kind() == "turn.started")
            .count()
    };
    assert_eq!(started(), 2);
    // Each place that becomes free goes to the one that waits longest.
    for number in 1..=3 {
        host.send(&interrupt(&format!("s{number}"), &format!("i{number}")));
        host.wait_started(&format!("r{}", number + 2));
    }
    assert_eq!(started(), 5);
}

#[test]
fn an_interrupt_stops_a_running_turn_and_keeps_its_text() {
    let host = Host::start(Options::new());
    host.send(&script_turn("s", "r", &held()));
    host.wait_event("s", "message.delta");
    let ack = host.ask(&interrupt("s", "i"));
    assert_eq!(
        (ack.kind(), &ack["applied"]),
        ("interrupt.ack", &json!(true))
    );
    assert!(
        ack["applied_ns"]
            .as_u64()
            .is_some_and(|ns| ns <= ack.host_ns())
    );
    let end = host.answer("r");
    assert_eq!(
        (end.kind(), &end["interrupted"]),
        ("turn.end", &json!(true))
    );
    let complete = host.wait_event("s", "message.complete");
    assert_eq!(complete.payload()["status"], "interrupted");
    assert_eq!(complete.payload()["text"], "held");
    // What was said so far is part of the conversation.
    let next = host.ask(&turn("s", "next", "x"));
    assert_eq!(
        (&next["interrupted"], &next["message_count"]),
        (&json!(false), &json!(4))
    );
}

#[test]
fn an_interrupt_of_what_does_not_run_is_answered() {
    let host = Host::start(Options::new());
    let unknown = host.ask(&interrupt("nobody", "i1"));
    assert_eq!(
        (unknown.kind(), &unknown["applied"]),
        ("interrupt.ack", &json!(false))
    );
    assert!(unknown["applied_ns"].is_null(), "{}", unknown.line());
    host.ask(&turn("s", "r", "x"));
    assert_eq!(host.ask(&interrupt("s", "i2"))["applied"], true);
    // It does not reach into the next turn.
    assert_eq!(host.ask(&turn("s", "r2", "x"))["interrupted"], false);
}

#[test]
fn an_interrupt_without_a_sid_is_answered() {
    let host = Host::start(Options::new());
    let answer = host.ask(&json!({"type": "interrupt", "request_id": "i"}));
    match answer.kind() {
        "interrupt.ack" => assert_eq!(answer["applied"], false),
        "error" => assert_eq!(answer["message"], "sid required"),
        _ => panic!("{}", answer.line()),
    }
}

#[test]
fn a_queued_turn_is_interrupted_without_having_run() {
    let host = Host::start(two_workers());
    hold_both(&host, &stuck());
    host.send(&turn("s", "queued", "x"));
    assert_eq!(host.ask(&interrupt("s", "i"))["applied"], true);
    check_never_ran(&host, "s", "queued");
    // Its session is free again, and so is its place in the queue.
    host.send(&turn("s", "queued again", "x"));
    assert_eq!(host.ask(&interrupt("s", "i2"))["applied"], true);
    check_never_ran(&host, "s", "queued again");
}

#[test]
fn an_interrupt_right_behind_its_turn_ends_it() {
    let host = Host::start(Options::new());
    for number in 0..200 {
        let (sid, id) = (format!("s{number}"), format!("r{number}"));
        let start = script_turn(&sid, &id, &held());
        let stop = interrupt(&sid, &format!("i{number}"));
        host.send_raw(format!("{start}\n{stop}\n"));
    }
    for number in 0..200 {
        assert_eq!(host.answer(&format!("i{number}"))["applied"], true);
        assert_eq!(host.answer(&format!("r{number}"))["interrupted"], true);
    }
}

#[test]
fn each_of_many_interrupts_is_answered_once() {
    let host = Host::start(two_workers());
    host.send(&script_turn("s", "r", &stuck()));
    host.wait_started("r");
    for number in 0..20 {
        let ack = host.ask(&interrupt("s", &format!("i{number}")));
        assert_eq!(
            (ack.kind(), &ack["applied"]),
            ("interrupt.ack", &json!(true))
        );
    }
    for number in 0..20 {
        assert_eq!(host.frames_with_id(&format!("i{number}")).len(), 1);
    }
    assert!(
        host.frames_with_id("r")
            .iter()
            .all(|frame| !frame.is_terminal())
    );
}

#[test]
fn interrupts_are_answered_with_every_worker_stuck_and_the_output_saturated() {
    const FLOODS: usize = 6;
    let options = Options::with_faults().args(["--workers", "8"]);
    let host = Host::start(options);
    for sid in ["stuck1", "stuck2"] {
        host.send(&script_turn(sid, sid, &stuck()));
        host.wait_started(sid);
    }
    host.stop_reading();
    let flood = json!([{"deltas": {"count": 1_000_000, "text": "0123456789"}}]);
    for number in 0..FLOODS {
        let sid = format!("flood{number}");
        host.send(&script_turn(&sid, &sid, &flood));
    }
    host.send(&turn("queued", "queued", "x"));
    host.wait_quiet();
    // Nothing is read, every worker is taken: stop all of it. The queued turn comes first, since a
    // flood that ends gives it a worker.
    host.send(&interrupt("queued", "iq"));
    for number in 0..FLOODS {
        host.send(&interrupt(
            &format!("flood{number}"),
            &format!("if{number}"),
        ));
    }
    for number in 0..50 {
        host.send(&interrupt("stuck1", &format!("is{number}")));
    }
    host.wait_quiet();
    host.read_on();
    let acks = (0..FLOODS)
        .map(|number| format!("if{number}"))
        .chain((0..50).map(|number| format!("is{number}")))
        .chain(["iq".to_owned()]);
    for id in acks {
        let ack = host.answer(&id);
        assert_eq!(
            (ack.kind(), &ack["applied"]),
            ("interrupt.ack", &json!(true))
        );
    }
    for number in 0..FLOODS {
        assert_eq!(host.answer(&format!("flood{number}"))["interrupted"], true);
    }
    check_never_ran(&host, "queued", "queued");
    let frames = host.frames();
    let ack = frames
        .iter()
        .position(|frame| frame.answers("if0"))
        .expect("it was answered");
    assert!(
        frames[ack..]
            .iter()
            .any(|frame| frame.event().is_some() && frame.host_ns() < frames[ack].host_ns()),
        "an answer goes before the deltas that waited when it was given"
    );
}

#[test]
fn a_panic_ends_its_turn_and_nothing_else() {
    let host = Host::start(two_workers());
    host.send(&script_turn("other", "other", &held()));
    host.wait_started("other");
    let steps = json!([{"delta": "before"}, {"panic": "on purpose"}]);
    let error = host.ask(&script_turn("s", "r", &steps));
    assert_eq!(error.kind(), "turn.error");
    assert_eq!(
        (&error["reason"], &error["execution_state"]),
        (&json!("panic"), &json!("unknown"))
    );
    let message = error["message"].as_str().unwrap_or_default();
    assert!(message.contains("on purpose"), "{message}");
    let event = host.wait_event("s", "error");
    assert_eq!(event.payload()["reason"], "panic");
    assert!(event.host_ns() <= error.host_ns());
    // The session, the worker and the other turn go on.
    for number in 0..5 {
        let id = format!("panic {number}");
        assert_eq!(host.ask(&script_turn("s", &id, &steps))["reason"], "panic");
    }
    assert_eq!(host.ask(&turn("s", "next", "x")).kind(), "turn.end");
    host.ask(&interrupt("other", "i"));
    assert_eq!(host.answer("other")["interrupted"], true);
}

#[test]
fn an_agent_that_raises_ends_its_turn() {
    let host = Host::start(Options::new());
    let steps = json!([{"delta": "before"}, {"fail": "no such model"}]);
    let error = host.ask(&script_turn("s", "r", &steps));
    assert_eq!(error.kind(), "turn.error");
    assert_eq!(
        (&error["reason"], &error["execution_state"]),
        (&json!("exception"), &json!("unknown"))
    );
    let event = host.wait_event("s", "error");
    for message in [&error["message"], &event.payload()["message"]] {
        let message = message.as_str().unwrap_or_default();
        assert!(message.contains("no such model"), "{message}");
    }
    assert_eq!(host.ask(&turn("s", "next", "x")).kind(), "turn.end");
}

#[test]
fn each_turn_has_exactly_one_end() {
    const SESSIONS: usize = 40;
    const ROUNDS: usize = 5;
    let host = Host::start(Options::with_faults().args(["--workers", "4"]));
    let kinds = [
        json!([{"say": "x"}]),
        json!([{"deltas": {"count": 50, "text": "x "}}]),
        json!([{"fail": "x"}]),
        json!([{"panic": "x"}]),
        held(),
    ];
    let id = |session: usize, round: usize| format!("r{session}.{round}");
    for round in 0..ROUNDS {
        for session in 0..SESSIONS {
            let steps = &kinds[(session + round) % kinds.len()];
            let sid = format!("s{session}");
            host.send(&script_turn(&sid, &id(session, round), steps));
            if *steps == kinds[4] {
                host.send(&interrupt(&sid, &format!("i{session}.{round}")));
            }
        }
        for session in 0..SESSIONS {
            host.answer(&id(session, round));
        }
    }
    host.wait_quiet();
    let mut ends: HashMap<String, usize> = HashMap::new();
    for frame in host.frames().iter().filter(|frame| frame.is_terminal()) {
        let id = frame.request_id_json().unwrap_or_default().to_owned();
        *ends.entry(id).or_default() += 1;
    }
    assert_eq!(ends.len(), SESSIONS * ROUNDS);
    assert!(ends.values().all(|count| *count == 1), "{ends:?}");
}

#[test]
fn sessions_do_not_wait_for_each_other() {
    let host = Host::start(two_workers());
    host.send(&script_turn("stuck", "stuck", &stuck()));
    host.wait_started("stuck");
    for number in 0..50 {
        let id = format!("r{number}");
        assert_eq!(host.ask(&turn(&id, &id, "x")).kind(), "turn.end");
    }
}

#[test]
fn history_seeds_a_new_key_and_is_ignored_for_a_known_one() {
    let host = Host::start(Options::new());
    let history = json!([
        {"role": "user", "content": "before"},
        {"role": "assistant", "content": "before", "unknown": [1.50, {"deep": null}]},
    ]);
    let run = |id: &str, history: &Value, replace: bool| {
        let mut frame = turn("s", id, "x");
        frame["history"] = history.clone();
        frame["replace_history"] = json!(replace);
        host.ask(&frame)["message_count"].clone()
    };
    assert_eq!(run("seeds", &history, false), 4);
    assert_eq!(run("stale", &json!([]), false), 6);
    assert_eq!(run("replaces", &history, true), 4);
}

#[test]
fn panics_do_not_wait_for_a_reader_of_stderr() {
    const TURNS: usize = 2_000;
    // The host's stderr is a pipe that nobody reads, and nobody closes.
    let unread = r#"mkfifo "$HOME/err" && exec 4<>"$HOME/err" && exec "$@" <&3 3<&- 2>&4"#;
    let mut host = Host::start(Options::with_faults().shell(unread));
    let message = "0123456789".repeat(100);
    let steps = json!([{"panic": message}]);
    for number in 0..TURNS {
        let error = host.ask(&script_turn("s", &format!("r{number}"), &steps));
        assert_eq!(
            (error.kind(), &error["reason"]),
            ("turn.error", &json!("panic"))
        );
    }
    host.close_stdin();
    host.exit();
    let log = host.log();
    assert!(
        log.lines()
            .any(|line| line.contains("panicked") && line.contains(&message)),
        "the log tells them"
    );
}

/// What `sid` was told from the acceptance of `request_id` on.
fn story_from(host: &Host, sid: &str, request_id: &str) -> Vec<String> {
    let frames = host.frames_of(sid);
    let accepted = frames
        .iter()
        .position(|frame| frame.answers(request_id))
        .expect("it was answered");
    host.story(sid).split_off(accepted)
}

/// Thousands of frames of 200 bytes, each of which is answered.
fn flood() -> String {
    let pad = "x".repeat(150);
    (0..5_000)
        .map(|number| format!("{}\n", probe(&format!("{pad}{number}"))))
        .collect()
}

#[test]
fn a_turn_keeps_its_order_behind_thousands_of_answers() {
    for number in 0..5 {
        let host = Host::start(Options::new());
        host.stop_reading();
        let start = script_turn("s", "r", &json!([{"delta": "a"}, {"delta": "b"}]));
        host.send_raw(format!("{}{start}\n", flood()));
        if number > 0 {
            // The first time while the host is still at it.
            host.wait_quiet();
        }
        host.read_on();
        assert_eq!(host.answer("r").kind(), "turn.end");
        assert_eq!(
            story_from(&host, "s", "r"),
            [
                "turn.accepted",
                "turn.started",
                "message.start",
                "message.delta",
                "message.delta",
                "message.complete",
                "session.info",
                "turn.end",
            ]
        );
    }
}

#[test]
fn a_close_is_answered_after_its_turn_behind_thousands_of_answers() {
    for _ in 0..5 {
        let host = Host::start(Options::new());
        host.send(&script_turn("s", "r", &held()));
        host.wait_event("s", "message.delta");
        host.stop_reading();
        let close = json!({"type": "session.close", "sid": "s", "request_id": "close"});
        host.send_raw(format!("{}{close}\n", flood()));
        host.wait_quiet();
        host.read_on();
        assert_eq!(host.answer("close").kind(), "session.close.ack");
        assert_eq!(
            story_from(&host, "s", "r"),
            [
                "turn.accepted",
                "turn.started",
                "message.start",
                "message.delta",
                "message.complete",
                "session.info",
                "turn.end",
                "session.close.ack",
            ]
        );
    }
}

#[test]
fn a_session_that_is_closed_and_begins_anew_tells_both_in_order() {
    for _ in 0..5 {
        let host = Host::start(Options::new());
        host.ask(&turn("s", "old", "x"));
        host.stop_reading();
        let close = json!({"type": "session.close", "sid": "s", "request_id": "close"});
        let start = turn("s", "new", "x");
        host.send_raw(format!("{}{close}\n{start}\n", flood()));
        host.wait_quiet();
        host.read_on();
        assert_eq!(host.answer("new").kind(), "turn.end");
        assert_eq!(
            story_from(&host, "s", "close"),
            [
                "session.close.ack",
                "turn.accepted",
                "turn.started",
                "message.start",
                "message.delta",
                "message.complete",
                "session.info",
                "turn.end",
            ]
        );
    }
}

#[test]
fn a_turn_waits_only_when_no_worker_is_free() {
    let both = |first: &str, second: &str| {
        [first, second]
            .map(|id| format!("{}\n", turn(id, id, "x")))
            .concat()
    };
    for _ in 0..20 {
        let host = Host::start(two_workers().args(["--max-queued-turns", "1"]));
        host.send_raw(both("a", "b"));
        for id in ["a", "b"] {
            assert_eq!(host.answer(id).kind(), "turn.end");
        }
    }
    let host = Host::start(two_workers().args(["--max-queued-turns", "1"]));
    hold_both(&host, &held());
    host.send_raw(both("waits", "too many"));
    let refused = host.answer("too many");
    check_refused(&refused, "capacity", "");
    assert_eq!(refused["code"], 5019);
    host.ask(&interrupt("hold1", "i"));
    assert_eq!(host.answer("waits")["interrupted"], false);
}

#[test]
fn without_a_queue_turns_run_while_workers_are_free() {
    let host = Host::start(two_workers().args(["--max-queued-turns", "0"]));
    for number in 0..20 {
        let id = format!("r{number}");
        assert_eq!(host.ask(&turn("s", &id, "x")).kind(), "turn.end");
        // Its worker may still be on the way back.
        host.wait_quiet();
    }
    hold_both(&host, &held());
    check_refused(&host.ask(&turn("s", "no", "x")), "capacity", "");
    host.ask(&interrupt("hold1", "i"));
    host.answer("hold1");
    host.wait_quiet();
    assert_eq!(host.ask(&turn("s", "yes", "x")).kind(), "turn.end");
}

#[test]
fn a_request_id_that_is_live_may_be_written_otherwise() {
    let host = Host::start(Options::new());
    let start = |sid: &str, id: &str, steps: &Value| {
        script_turn(sid, "ID", steps)
            .to_string()
            .replace(r#""ID""#, id)
    };
    host.send_line(&start("s", r#""\u0061""#, &held()));
    host.wait_started("a");
    host.send_line(&start("other", r#""a""#, &json!([])));
    let refused = host.answer("a");
    check_refused(&refused, "invalid", "request_id");
    assert_eq!(
        (refused.sid(), refused.request_id_json()),
        (Some("other"), Some(r#""a""#))
    );
    host.ask(&interrupt("s", "i"));
    let end = host.wait_for("the end of the first", |frame| frame.kind() == "turn.end");
    assert_eq!(end.request_id_json(), Some(r#""\u0061""#));
}

#[test]
fn turns_that_wait_have_256_mib_together() {
    const MIB: usize = 1024 * 1024;
    let host = Host::start(two_workers());
    hold_both(&host, &held());
    let text = "x".repeat(8 * MIB);
    // One after the other, so that they wait in the host and not before it.
    let send = |id: &str| {
        host.send(&turn(id, id, &text));
        host.wait_for(&format!("the first answer to {id}"), |frame| {
            frame.answers(id)
        })
    };
    let mut accepted = 0;
    for number in 0..70 {
        let answer = send(&format!("q{number}"));
        if answer.kind() == "turn.accepted" {
            accepted += 1;
        } else {
            check_refused(&answer, "capacity", "");
            assert_eq!(answer["code"], 5019);
        }
    }
    // Each is a little more than 8 MiB long.
    assert_eq!(accepted, 31);
    // A short one still has a place, and so has a long one when another goes.
    host.send(&turn("short", "short", "x"));
    host.wait_for("the acceptance of a short turn", |frame| {
        frame.kind() == "turn.accepted" && frame.answers("short")
    });
    host.ask(&interrupt("q0", "i"));
    check_never_ran(&host, "q0", "q0");
    assert_eq!(send("one more").kind(), "turn.accepted");
}
