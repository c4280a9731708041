//! Single decisions of the core, told as short histories.

use serde_json::Value;

use turnhost_protocol::limits;

use super::*;

const HELLO: &str = r#"{"type":"hello","home":"/home/a","boot_id":"b","heartbeat_secs":15}"#;

struct Told {
    core: Core,
    now: Nanos,
}

impl Told {
    /// A core whose first host is spawned, but has said nothing.
    fn starting() -> Self {
        let rules = Rules {
            max_frame_bytes: limits::MAX_FRAME_BYTES,
            homes: vec![PathBuf::from("/home/a")],
            build_sha: "sha".to_owned(),
            heartbeat: from_ms(15_000),
            respawn: RespawnRules::default(),
            hello_wait: from_ms(limits::HELLO_WAIT_MS),
        };
        let mut told = Self {
            core: Core::new(rules),
            now: from_ms(1_000),
        };
        assert_eq!(told.step(Event::Time(None)), [Action::Spawn]);
        told.step(Event::Spawned);
        told
    }

    /// A core whose host works.
    fn ready() -> Self {
        let mut told = Self::starting();
        told.host(HELLO);
        told.step(Event::Registered(Ok(())));
        told
    }

    /// A core whose host ended and left nothing; the next one comes after a delay.
    fn waiting() -> Self {
        let mut told = Self::ready();
        let exit = Exit::Code(1);
        told.step(Event::HostExited { exit, written: 0 });
        told.step(Event::SessionLeft(0));
        assert!(matches!(told.core.phase, Phase::Waiting { .. }));
        told
    }

    fn step(&mut self, event: Event<'_>) -> Vec<Action> {
        let mut actions = Vec::new();
        self.core.step(event, self.now, &mut actions);
        actions
    }

    fn gateway(&mut self, line: &str) -> Vec<Action> {
        self.step(Event::GatewayLine(line.as_bytes()))
    }

    fn host(&mut self, line: &str) -> Vec<Action> {
        self.step(Event::HostLine(line.as_bytes()))
    }

    fn crash(&mut self, written: u64) -> Vec<Action> {
        let exit = Exit::Signal(9);
        self.step(Event::HostExited { exit, written })
    }
}

/// The frames that the gateway is told.
fn frames(actions: &[Action]) -> Vec<Value> {
    let mut lines = Vec::new();
    for action in actions {
        if let Action::Tell(notice) = action {
            notice.encode(limits::MAX_FRAME_BYTES, &mut lines);
        }
    }
    let lines = String::from_utf8(lines).unwrap();
    lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn types(actions: &[Action]) -> Vec<String> {
    let kinds = frames(actions);
    kinds
        .iter()
        .map(|frame| frame["type"].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn a_shutdown_that_the_host_will_refuse_drains_nothing() {
    for line in [
        r#"{"type":"shutdown","request_id":"x","wait_ms":"soon"}"#,
        r#"{"type":"shutdown","request_id":"x","wait_ms":1.5}"#,
        r#"{"type":"shutdown","request_id":"x", broken"#,
    ] {
        let mut told = Told::ready();
        assert_eq!(told.gateway(line), [Action::RelayToHost], "{line}");
        assert_eq!(told.core.drain, None, "{line}");
        let error = r#"{"type":"error","request_id":"x","message":"no"}"#;
        assert_eq!(told.host(error), [Action::RelayToGateway]);
        assert_eq!(told.core.pending.len(), 0, "{line}");
        // Without a host it waits for the next one, as any frame does.
        let mut told = Told::waiting();
        assert_eq!(told.gateway(line), [], "{line}");
        assert_eq!(told.core.status().kept_frames, 1, "{line}");
    }
    for line in [
        r#"{"type":"shutdown","request_id":"x"}"#,
        r#"{"type":"shutdown","request_id":"x","wait_ms":null}"#,
        r#"{"type":"shutdown","wait_ms":"soon","wait_ms":0}"#,
    ] {
        let mut told = Told::ready();
        told.gateway(line);
        assert!(matches!(told.core.drain, Some(Drain::Until(_))), "{line}");
    }
}

#[test]
fn a_refused_shutdown_ends_its_drain() {
    let shutdown = r#"{"type":"shutdown","request_id":"x"}"#;
    let error = r#"{"type":"error","request_id":"x","message":"no"}"#;
    let refused = || {
        let mut told = Told::ready();
        told.gateway(shutdown);
        told
    };
    let mut told = refused();
    told.host(error);
    assert_eq!(told.core.drain, None);
    assert_eq!(types(&told.crash(0)), ["host.exited"]);

    // What was asked for after it counts from then on.
    let mut told = refused();
    told.step(Event::GatewayClosed);
    told.host(error);
    assert!(matches!(told.core.drain, Some(Drain::Until(_))));
    let mut told = refused();
    assert_eq!(told.step(Event::Terminate), []);
    let signal = Action::SignalHost(Signal::Terminate);
    assert!(told.host(error).contains(&signal));
    assert_eq!(types(&told.crash(0)), [""; 0]);

    // A drain that another cause began goes on.
    let mut told = Told::ready();
    told.step(Event::Terminate);
    told.gateway(shutdown);
    told.host(error);
    assert!(matches!(told.core.drain, Some(Drain::Until(_))));
}

#[test]
fn a_host_that_takes_an_odd_shutdown_ends_as_asked() {
    let mut told = Told::ready();
    told.gateway(r#"{"type":"shutdown","request_id":"x","wait_ms":1.5}"#);
    told.host(r#"{"type":"shutdown.ack","request_id":"x"}"#);
    assert_eq!(types(&told.crash(0)), [""; 0]);
}

#[test]
fn broken_lines_of_known_types_are_left_to_the_host() {
    let mut told = Told::waiting();
    assert_eq!(told.gateway(r#"{"type":"host.restart", broken"#), []);
    told.gateway(r#"{"type":"turn.start","sid":"s","request_id":"t","text":"x"}"#);
    assert_eq!(told.gateway(r#"{"type":"interrupt","sid":"s", broken"#), []);
    assert_eq!(
        told.gateway(r#"{"type":"idle.probe","request_id":"p", broken"#),
        []
    );
    assert_eq!(told.core.status().pending_turns, 1);
    assert_eq!(told.core.status().kept_frames, 4);
    assert_eq!(
        told.gateway(r#"{"type":"host.restart"}"#),
        [Action::Spawn],
        "a whole one is acted on"
    );
}

#[test]
fn a_shutdown_is_done_however_much_waits() {
    let shutdown = r#"{"type":"shutdown","request_id":"bye"}"#;
    let mut told = Told::starting();
    for number in 0..limits::KEPT_FRAMES + 1 {
        told.gateway(&format!(r#"{{"type":"control","request_id":{number}}}"#));
    }
    assert_eq!(told.gateway(shutdown), []);
    told.host(HELLO);
    told.step(Event::Registered(Ok(())));
    assert!(matches!(told.core.drain, Some(Drain::Until(_))));

    let mut told = Told::ready();
    let interrupt =
        |number| format!(r#"{{"type":"interrupt","sid":"s","request_id":"i{number}"}}"#);
    for number in 0..limits::MAX_PENDING_FRAMES {
        told.gateway(&format!(r#"{{"type":"control","request_id":{number}}}"#));
    }
    assert_eq!(told.gateway(&interrupt(0)), [Action::RelayToHost]);
    let refused = told.gateway(r#"{"type":"control","request_id":"c"}"#);
    assert_eq!(types(&refused), ["control.error"]);
    for number in 1..limits::MAX_PENDING_FRAMES {
        told.gateway(&interrupt(number));
    }
    assert_eq!(
        types(&told.gateway(&interrupt(0))),
        ["error"],
        "there is a bound"
    );
    assert_eq!(told.gateway(shutdown)[0], Action::RelayToHost);
    assert!(matches!(told.core.drain, Some(Drain::Until(_))));
}

#[test]
fn an_answer_under_a_made_id_settles_a_frame_whose_id_is_no_use() {
    let long = "x".repeat(limits::max_request_id_bytes(limits::MAX_FRAME_BYTES));
    let far = "x".repeat(limits::LOOK_BYTES);
    let made = |kind: &str| format!(r#"{{"type":"{kind}","sid":"s","request_id":"made"}}"#);
    for (line, answer) in [
        (
            format!(r#"{{"type":"turn.start","sid":"s","request_id":"{long}"}}"#),
            made("turn.error"),
        ),
        (
            format!(r#"{{"type":"control","sid":"s","request_id":"{long}"}}"#),
            made("control.error"),
        ),
        (
            format!(r#"{{"type":"session.close","sid":"s","request_id":"{long}"}}"#),
            made("error"),
        ),
        (
            format!(r#"{{"type":"shutdown","sid":"s","request_id":"{long}"}}"#),
            made("error"),
        ),
        (
            format!(r#"{{"type":"turn.start","sid":"s","a":"{far}","request_id":"r", broken"#),
            made("turn.error"),
        ),
        (
            format!(r#"{{"type":"control","sid":"s","a":"{far}","request_id":"r", broken"#),
            r#"{"type":"error","sid":"s","message":"invalid json"}"#.to_owned(),
        ),
        (
            format!(r#"{{"type":"interrupt","sid":"{far}","request_id":"r"}}"#),
            r#"{"type":"error","request_id":"r","message":"sid"}"#.to_owned(),
        ),
        (
            r#"{"type":"interrupt","sid":"s"}"#.to_owned(),
            made("error"),
        ),
    ] {
        let mut told = Told::ready();
        assert_eq!(told.gateway(&line), [Action::RelayToHost]);
        assert_eq!(told.host(&answer), [Action::RelayToGateway], "{answer}");
        let told_at_crash = types(&told.crash(0));
        assert_eq!(told_at_crash, ["host.exited"], "{}", &line[..60]);
    }
}

#[test]
fn ids_that_wait_are_bounded_in_bytes() {
    let long = "x".repeat(limits::max_request_id_bytes(limits::MAX_FRAME_BYTES) - 10);
    let mut told = Told::ready();
    let mut send = |number: usize| {
        told.gateway(&format!(
            r#"{{"type":"control","request_id":"{number}{long}"}}"#
        ))
    };
    let relayed = (0..100).filter(|number| send(*number) == [Action::RelayToHost]);
    assert_eq!(relayed.count(), 32);
    assert!(told.core.pending.bytes() <= pending::MAX_PENDING_BYTES);
    told.crash(0);
    assert_eq!(told.core.pending.bytes(), 0);
}

#[test]
fn a_hello_is_read_as_any_frame_is() {
    for line in [
        r#"{"type":"hello","version":null,"build_sha":null,"boot_id":null,"home":null}"#,
        r#"{"type":"hello","home":"/home/b","h\u006fme":"/home/a","home":"/home/a"}"#,
        r#"{"type":"hello","protocol_version":1.0,"heartbeat_secs":"15"}"#,
        r#"{"type":"hello","protocol_version":"1","boot_id":7,"version":"\ud800"}"#,
        r#"{"type":"hello","protocol_version":null,"heartbeat_secs":[]}"#,
    ] {
        let mut told = Told::starting();
        let actions = told.host(line);
        assert!(actions.contains(&Action::RelayToGateway), "{line}");
        assert!(matches!(told.core.phase, Phase::Registering), "{line}");
    }
    for line in [
        r#"{"type":"hello","protocol_version":1.5}"#,
        r#"{"type":"hello","protocol_version":2}"#,
        r#"{"type":"hello","protocol_version":[1]}"#,
        r#"{"type":"hello","home":{}}"#,
        r#"{"type":"hello","home":"/home/a","home":"/home/b"}"#,
        r#"{"type":"hello","build_sha":"other"}"#,
    ] {
        let mut told = Told::starting();
        told.host(line);
        assert!(matches!(told.core.phase, Phase::Failed { .. }), "{line}");
    }
}

#[test]
fn a_second_hello_is_no_restart() {
    let mut told = Told::ready();
    let actions = told.host(HELLO);
    assert!(matches!(actions[..], [Action::Log(..)]), "{actions:?}");
    // Nor is one that comes after its host was told to end for its silence.
    let mut told = Told::starting();
    told.now += from_ms(limits::HELLO_WAIT_MS);
    told.step(Event::Time(None));
    let actions = told.host(HELLO);
    assert!(matches!(actions[..], [Action::Log(..)]), "{actions:?}");
}

#[test]
fn heartbeats_are_expected_at_a_sensible_pace() {
    for (secs, first_look) in [
        ("1e-9", Some(from_ms(10) / 4)),
        ("15", Some(from_ms(15_000) / 4)),
        ("0", None),
    ] {
        let mut told = Told::starting();
        told.host(&format!(r#"{{"type":"hello","heartbeat_secs":{secs}}}"#));
        told.step(Event::Registered(Ok(())));
        told.host(r#"{"type":"hb"}"#);
        let look = told.core.deadline().map(|at| at - told.now);
        assert_eq!(look, first_look, "{secs}");
    }
}

#[test]
fn a_turn_that_no_host_had_ends_with_all_that_an_end_has() {
    let mut told = Told::waiting();
    told.gateway(r#"{"type":"turn.start","sid":"s","session_key":"k","request_id":"t"}"#);
    let frames = frames(&told.gateway(r#"{"type":"interrupt","sid":"s","request_id":"i"}"#));
    let [info, end, ack] = &frames[..] else {
        panic!("{frames:?}");
    };
    let params = &info["message"]["params"];
    assert_eq!(params["type"], "session.info");
    assert_eq!(params["session_id"], "s");
    assert_eq!(params["payload"]["stored_session_id"], "k");
    assert_eq!(params["payload"]["running"], false);
    assert_eq!(end["type"], "turn.end");
    assert_eq!(end["session_info"], params["payload"]);
    assert_eq!(end["session_info_emitted"], true);
    assert_eq!(end["message_count"], 0);
    assert_eq!(end["history_version"], 0);
    assert_eq!(end["usage"]["calls"], 0);
    assert_eq!(ack["applied"], true);
}

#[test]
fn a_stopped_host_is_woken_to_end() {
    let wakes = Action::SignalHost(Signal::Continue);
    for event in [Event::Terminate, Event::GatewayClosed] {
        let actions = Told::ready().step(event);
        assert_eq!(actions.last(), Some(&wakes));
    }
    let shutdown = r#"{"type":"shutdown","request_id":"x"}"#;
    let mut told = Told::ready();
    assert_eq!(told.gateway(shutdown), [Action::RelayToHost, wakes]);
}

#[test]
fn a_host_that_cannot_be_killed_is_left_behind_at_the_end() {
    let turn = r#"{"type":"turn.start","sid":"s","request_id":"t","text":"x"}"#;
    let after = |told: &mut Told, ms: u64| {
        let until = told.now + from_ms(ms);
        let mut all = Vec::new();
        while let Some(at) = told.core.deadline()
            && at <= until
        {
            told.now = at;
            let actions = told.step(Event::Time(None));
            let ended = matches!(actions.last(), Some(Action::End(_)));
            all.extend(actions);
            if ended {
                return all;
            }
        }
        told.now = until;
        all
    };
    for (event, budget) in [
        (Event::GatewayClosed, limits::STDIN_CLOSED_WAIT_MS),
        (Event::Terminate, limits::SIGNAL_WAIT_MS),
    ] {
        let mut told = Told::ready();
        told.gateway(turn);
        told.step(event);
        let actions = after(&mut told, budget + limits::DRAIN_EXCESS_MS + 5_000);
        assert_eq!(actions.last(), Some(&Action::End(EndCode::Orderly)));
        let frames = frames(&actions);
        let terminal = frames.last().unwrap();
        assert_eq!(terminal["type"], "turn.error");
        assert_eq!(terminal["reason"], "draining");
        assert_eq!(terminal["execution_state"], "unknown");
        assert_eq!(told.core.deadline(), None);
        assert_eq!(told.crash(9), [], "what comes later is too late");
    }

    // One that failed is waited for, until an end is asked for.
    let mut told = Told::ready();
    told.gateway(turn);
    told.step(Event::HostPipeClosed);
    let actions = after(&mut told, 100_000);
    assert!(actions.contains(&Action::SignalHost(Signal::Kill)));
    assert_eq!(told.core.deadline(), None);
    told.step(Event::GatewayClosed);
    let actions = after(&mut told, 10_000);
    assert_eq!(actions.last(), Some(&Action::End(EndCode::Orderly)));

    // The first one that fails is waited for by nobody.
    let mut told = Told::starting();
    told.gateway(turn);
    let actions = after(&mut told, 100_000);
    assert_eq!(actions.last(), Some(&Action::End(EndCode::NoFirstHost)));
    assert_eq!(types(&actions), ["rpc", "turn.error", "host.gave_up"]);
}
