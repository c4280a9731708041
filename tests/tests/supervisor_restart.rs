//! SPEC §9: handshake, respawn, giving up, and the watchdog.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use turnhost_tests::gateway::{Arrival, lives, wait_gone};
use turnhost_tests::host::Exit;
use turnhost_tests::{Gateway, Supervision, script_turn, turn};

fn signal(pid: i32, signal: Signal) {
    kill_process(Pid::from_raw(pid).expect("a pid"), signal).expect("it runs");
}

#[test]
fn every_unasked_exit_is_followed_by_a_restart_with_growing_delays() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    // Exit code 0 is no reason to stay away, and neither is any signal.
    let ends: [(&str, Value, Value); 3] = [
        ("exit", json!(0), json!(null)),
        ("abort", json!(null), json!(6)),
        ("exit", json!(0), json!(null)),
    ];
    for (index, (how, code, by_signal)) in ends.into_iter().enumerate() {
        gateway.fake(how);
        let exited = gateway.wait_kind("host.exited", index + 1);
        assert_eq!((&exited["code"], &exited["signal"]), (&code, &by_signal));
        let delay_ms = [250, 500, 1000][index];
        assert_eq!(
            (&exited["will_retry"], &exited["delay_ms"]),
            (&json!(true), &json!(delay_ms))
        );
        assert_eq!(exited["restarts_in_window"], index + 1);
        gateway.wait_kind("hello", index + 2);
        let time_of = |kind: &str, nth: usize| {
            gateway.find("a frame", |arrivals: &[Arrival]| {
                let mut of_kind = arrivals
                    .iter()
                    .filter(|arrival| arrival.frame["type"] == kind);
                of_kind.nth(nth).map(|arrival| arrival.at)
            })
        };
        let waited = time_of("hello", index + 1) - time_of("host.exited", index);
        // The two frames are read one after the other: a little of the delay may be lost.
        assert!(
            waited + Duration::from_millis(100) >= Duration::from_millis(delay_ms),
            "{waited:?}"
        );
    }
    let pids: Vec<_> = (1..=4).map(|count| gateway.host_pid(count)).collect();
    gateway.fake("exit");
    let last = gateway.wait_kind("host.exited", 4);
    assert_eq!(last["will_retry"], false);
    let gave_up = gateway.wait_kind("host.gave_up", 1);
    let message = gave_up["message"].as_str().unwrap();
    assert!(
        message.contains("after 3 restarts within 300 s"),
        "{message}"
    );
    for pid in pids {
        wait_gone(pid);
    }
    // It stays, and says why there is no host.
    let refused = gateway.ask(&json!({"type": "control", "sid": "s", "request_id": "c"}));
    assert_eq!(refused["type"], "control.error");
    assert!(
        refused["message"]
            .as_str()
            .unwrap()
            .contains("no host runs: the host exited with code 0")
    );
    gateway.send(&json!({"type": "host.restart"}));
    gateway.wait_kind("hello", 5);
    assert_eq!(gateway.ask(&turn("s", "t", "x"))["type"], "turn.end");
    // Ignored while a host runs, and not relayed.
    gateway.send(&json!({"type": "host.restart", "request_id": "no"}));
    gateway.ask(&turn("s", "t2", "x"));
    assert!(
        gateway
            .frames()
            .iter()
            .all(|frame| frame["request_id"] != "no")
    );
    assert_eq!(gateway.frames_of_kind("host.gave_up").len(), 1);
    gateway.close_stdin();
    assert_eq!(gateway.exit(), Exit::Code(0));
}

#[test]
fn a_restart_frame_ends_a_running_delay() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]).args(["--respawn-max", "100"]));
    for count in 1..=6 {
        gateway.fake("exit");
        let exited = gateway.wait_kind("host.exited", count);
        gateway.send(&json!({"type": "host.restart"}));
        gateway.wait_kind("hello", count + 1);
        assert_eq!(exited["will_retry"], true);
    }
    // Without it the delays alone would have been 0.25 + 0.5 + 1 + 2 + 4 + 5 seconds.
    let arrivals = gateway.arrivals();
    assert!(arrivals.last().unwrap().at - arrivals[0].at < Duration::from_secs(12));
}

#[test]
fn stdin_that_closes_after_giving_up_is_code_70() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]).args(["--respawn-max", "0"]));
    gateway.fake("exit");
    gateway.wait_kind("host.gave_up", 1);
    assert!(lives(gateway.pid()), "it stays until its input ends");
    gateway.close_stdin();
    assert_eq!(gateway.exit(), Exit::Code(70));
}

#[test]
fn a_first_host_that_cannot_be_started_is_code_69() {
    let cases: Vec<(Supervision, &str)> = vec![
        (
            Supervision::of(["/no/such/host"]),
            "cannot start the host /no/such/host",
        ),
        (
            Supervision::of_fake(&["--exit", "0"]),
            "exited with code 0 before its hello",
        ),
        (
            Supervision::of_fake(&["--junk", "--exit", "3"]),
            "exited with code 3 before its hello",
        ),
        (
            Supervision::of_fake(&["--home", "/another/home"]),
            "uses the home /another/home",
        ),
        (
            Supervision::of_fake(&["--protocol", "2"]),
            "speaks protocol version 2",
        ),
        (Supervision::of_fake(&["--silent"]), "no hello within 10 s"),
        (
            Supervision::of_fake(&["--build", "abc"]).args(["--expect-build-sha", "def"]),
            "is build abc, expected was def",
        ),
    ];
    let running: Vec<_> = cases
        .into_iter()
        .map(|(how, message)| {
            let mut gateway = Gateway::spawn(how);
            gateway.send(&turn("s", "t", "x"));
            (gateway, message)
        })
        .collect();
    for (mut gateway, message) in running {
        let gave_up = gateway.wait_kind("host.gave_up", 1);
        assert!(
            gave_up["message"].as_str().unwrap().contains(message),
            "{gave_up} {message}"
        );
        let terminal = gateway.answer("t");
        assert_eq!(terminal["execution_state"], "not_started");
        assert_eq!(gateway.exit(), Exit::Code(69), "{message}");
        assert!(gateway.stderr().contains(message), "{}", gateway.stderr());
        assert_eq!(gateway.record(), None);
        assert_eq!(gateway.frames_of_kind("hello").len(), 0);
    }
}

#[test]
fn an_empty_or_unknown_build_and_another_version_are_accepted() {
    for (build, expected) in [
        ("", "def"),
        ("unknown", "def"),
        ("abc", ""),
        ("abc", "unknown"),
        ("abc", "abc"),
    ] {
        let how = Supervision::of_fake(&["--build", build]);
        let gateway = Gateway::start(how.args(["--expect-build-sha", expected]));
        gateway.wait_stderr("the host has version fake");
    }
}

#[test]
fn nothing_is_sent_before_hello_and_no_later_host_is_told_twice() {
    // A host that is killed in its handshake is started again, and what was kept stays kept.
    let slow = "sleep 0.3; exec \"$@\"";
    let fake = turnhost_tests::binary::fake_host().to_str().unwrap();
    let how = Supervision::of(["sh", "-c", slow, "sh", fake]).args(["--respawn-max", "20"]);
    let mut gateway = Gateway::start(how);
    gateway.fake("exit");
    gateway.wait_kind("host.exited", 1);
    gateway.send(&turn("s", "t", "x"));
    let mut killed = Vec::new();
    while killed.len() < 3 {
        let record = gateway.record().filter(|record| record["boot_id"] == "");
        let pid = record.and_then(|record| record["host_pid"].as_i64());
        let Some(pid) = pid.filter(|pid| !killed.contains(pid)) else {
            std::thread::yield_now();
            continue;
        };
        signal(i32::try_from(pid).unwrap(), Signal::KILL);
        killed.push(pid);
        gateway.wait_kind("host.exited", killed.len() + 1);
    }
    let terminal = gateway.answer("t");
    assert_eq!(terminal["type"], "turn.end");
    assert_eq!(gateway.frames_of_kind("turn.accepted").len(), 1);
}

#[test]
fn a_stopped_host_is_ended_and_replaced() {
    let mut gateway = Gateway::start(Supervision::of_fake(&["--beats", "0.2"]));
    gateway.send(&json!({"type": "fake", "do": "say", "frame": {"type": "hb"}}));
    gateway.wait_kind("hb", 1);
    gateway.send(&turn("s", "t", "hang"));
    gateway.wait_kind("turn.accepted", 1);
    gateway.fake("stop");
    let stopped = Instant::now();
    let exited = gateway.wait_kind("host.exited", 1);
    // SIGTERM and SIGCONT are enough for it.
    assert_eq!(exited["signal"], 15);
    assert!(stopped.elapsed() < Duration::from_secs(10));
    assert_eq!(gateway.answer("t")["reason"], "crash");
    gateway.wait_stderr("the host hangs");
    gateway.wait_kind("hello", 2);
}

#[test]
fn a_host_that_works_or_never_beat_is_not_a_hang() {
    // Never a heartbeat: not watched.
    let mut never = Gateway::start(Supervision::of_fake(&["--beats", "0.05"]));
    // Busy without heartbeats for 3 intervals, but not for 20.
    let mut busy = Gateway::start(Supervision::of_fake(&["--beats", "0.5"]));
    busy.send(&json!({"type": "fake", "do": "say", "frame": {"type": "hb"}}));
    busy.wait_kind("hb", 1);
    let began = Instant::now();
    busy.fake("burn");
    never.ask(&turn("s", "t", "x"));
    let exited = busy.wait_kind("host.exited", 1);
    assert!(
        began.elapsed() >= Duration::from_millis(20 * 500 - 500),
        "{exited}"
    );
    assert_eq!(never.frames_of_kind("host.exited").len(), 0);
    assert_eq!(never.ask(&turn("s", "t2", "x"))["type"], "turn.end");
}

#[test]
fn a_gateway_that_does_not_read_is_not_a_hang() {
    let mut gateway = Gateway::start(Supervision::of_fake(&["--beats", "0.1"]));
    gateway.send(&json!({"type": "fake", "do": "say", "frame": {"type": "hb"}}));
    gateway.wait_kind("hb", 1);
    gateway.stop_reading();
    // The host stands in a write that nobody takes, for more than 20 intervals.
    gateway.send(&json!({"type": "fake", "do": "flood", "count": 60_000, "frame": {"type": "x", "y": "z".repeat(80)}}));
    gateway.fake("beat for ever");
    std::thread::sleep(Duration::from_millis(3_000));
    gateway.read_on();
    gateway.wait_kind("x", 60_000);
    gateway.wait_kind("hb", 2);
    assert_eq!(gateway.frames_of_kind("host.exited").len(), 0);
}

#[test]
fn a_host_that_closes_a_pipe_but_lives_is_ended() {
    for what in ["close output", "close input"] {
        let mut gateway = Gateway::start(Supervision::of_fake(&[]));
        gateway.fake(what);
        gateway.send(&turn("s", "t", "x"));
        gateway.wait_kind("host.exited", 1);
        gateway.wait_stderr("closed its input or output");
        gateway.wait_kind("hello", 2);
    }
}

#[test]
fn a_gateway_that_does_not_read_costs_no_host_its_hello() {
    let mut gateway = Gateway::start(Supervision::of_turnhost());
    let host = gateway.host_pid(1);
    gateway.stop_reading();
    let steps = json!([{"deltas": {"count": 3000, "text": "x".repeat(900)}}, {"sleep_ms": 60000}]);
    for index in 0..8 {
        gateway.send(&script_turn(
            &format!("s{index}"),
            &format!("t{index}"),
            &steps,
        ));
    }
    signal(host, Signal::KILL);
    // Longer than a host has for its hello.
    std::thread::sleep(Duration::from_secs(11));
    gateway.read_on();
    assert_ne!(gateway.host_pid(2), host);
    for index in 0..8 {
        assert_eq!(gateway.answer(&format!("t{index}"))["type"], "turn.error");
    }
    assert_eq!(gateway.frames_of_kind("host.exited").len(), 1);
    assert!(gateway.frames_of_kind("host.gave_up").is_empty());
}
