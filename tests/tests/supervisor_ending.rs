//! SPEC §9: end of input, signals, and what the host leaves behind.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;
use turnhost_protocol::process::Stat;
use turnhost_tests::gateway::{lives, wait_gone};
use turnhost_tests::host::Exit;
use turnhost_tests::{Gateway, Supervision, script_turn, turn};

/// A fake host behind a shell that has SIGTERM ignored for it.
fn deaf_fake(flags: &[&str]) -> Supervision {
    let fake = turnhost_tests::binary::fake_host().to_str().unwrap();
    let words = ["sh", "-c", "trap '' TERM; exec \"$@\"", "sh", fake];
    Supervision::of(words.into_iter().chain(flags.iter().copied()))
}

fn pid_of(value: &serde_json::Value) -> i32 {
    i32::try_from(value.as_i64().expect("a pid")).expect("a pid")
}

/// All children of a process, zombies too.
fn children(parent: i32) -> Vec<i32> {
    let pids = std::fs::read_dir("/proc").unwrap();
    let pids = pids.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let stat = Stat::of(*pid);
        matches!(stat, Ok(Some(stat)) if stat.ppid == parent)
    })
    .collect()
}

#[test]
fn the_end_of_input_drains_the_host() {
    let mut gateway = Gateway::start(Supervision::of_turnhost());
    let pid = gateway.host_pid(1);
    gateway.send(&script_turn(
        "s",
        "t",
        &json!([{"sleep_ms": 300}, {"say": "done"}]),
    ));
    gateway.close_stdin();
    assert_eq!(gateway.exit(), Exit::Code(0));
    assert_eq!(gateway.answer("t")["type"], "turn.end");
    assert!(gateway.frames_of_kind("host.exited").is_empty());
    wait_gone(pid);
    assert_eq!(gateway.record(), None);
}

#[test]
fn a_turn_that_was_sent_before_hello_still_runs_when_the_input_ends_at_once() {
    let mut gateway = Gateway::spawn(Supervision::of_turnhost());
    gateway.send(&turn("s", "t", "hello"));
    gateway.close_stdin();
    assert_eq!(gateway.exit(), Exit::Code(0));
    assert_eq!(gateway.answer("t")["type"], "turn.end");
}

#[test]
fn sigterm_is_forwarded_and_waited_for() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut gateway = Gateway::start(Supervision::of_turnhost());
        gateway.send(&script_turn(
            "s",
            "t",
            &json!([{"sleep_ms": 500}, {"say": "done"}]),
        ));
        gateway.wait_kind("turn.started", 1);
        gateway.signal(signal);
        assert_eq!(gateway.exit(), Exit::Code(0));
        assert_eq!(gateway.answer("t")["type"], "turn.end");
        let log = std::fs::read_to_string(gateway.home().join("logs/turnhost.log"));
        assert!(
            log.unwrap().contains("sigterm"),
            "the host was told by SIGTERM"
        );
    }
}

#[test]
fn signals_that_a_parent_blocked_are_heard() {
    let script = "exec env --block-signal=TERM --block-signal=CHLD \"$@\"";
    let mut gateway = Gateway::start(Supervision::of_fake(&[]).through_shell(script));
    let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.pid())).unwrap();
    let blocked = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
    assert_eq!(blocked.map(str::trim), Some("0000000000000000"));
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.exit(), Exit::Code(0));
}

#[test]
fn a_supervisor_behind_nohup_outlives_its_terminal() {
    let script = "trap '' HUP; exec \"$@\"";
    let mut gateway = Gateway::start(Supervision::of_fake(&[]).through_shell(script));
    gateway.signal(Signal::HUP);
    assert_eq!(gateway.ask(&turn("s", "t", "x"))["type"], "turn.end");
    // It is still there to be ended in order.
    gateway.signal(Signal::TERM);
    assert_eq!(gateway.exit(), Exit::Code(0));
}

#[test]
fn a_host_that_ends_by_nothing_is_killed_at_the_budget_plus_two_seconds() {
    // End of input: 2 s and 2 s.
    let mut by_input = Gateway::start(deaf_fake(&["--outlive-input"]));
    by_input.send(&turn("s", "t", "hang"));
    by_input.wait_kind("turn.accepted", 1);
    let began = Instant::now();
    by_input.close_stdin();
    // A signal: 10 s and 2 s. A shutdown frame that is not obeyed: its own wait and 2 s.
    let mut by_signal = Gateway::start(deaf_fake(&["--outlive-input"]));
    by_signal.fake("stop reading");
    by_signal.signal(Signal::TERM);
    let mut by_frame = Gateway::start(deaf_fake(&["--outlive-input"]));
    by_frame.fake("stop reading");
    by_frame.send(&json!({"type": "shutdown", "request_id": "bye", "wait_ms": 500}));
    assert_eq!(by_input.exit(), Exit::Code(0));
    assert!(began.elapsed() >= Duration::from_secs(4));
    let terminal = by_input.answer("t");
    assert_eq!(
        (&terminal["reason"], &terminal["execution_state"]),
        (&json!("draining"), &json!("unknown"))
    );
    assert_eq!(by_frame.exit(), Exit::Code(0));
    assert_eq!(by_frame.answer("bye")["type"], "shutdown.ack");
    assert_eq!(by_signal.exit(), Exit::Code(0));
    assert!(began.elapsed() >= Duration::from_secs(12));
    for gateway in [&by_input, &by_signal, &by_frame] {
        wait_gone(gateway.host_pid(1));
    }
}

#[test]
fn the_end_is_orderly_while_no_host_runs() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    gateway.fake("exit");
    gateway.wait_kind("host.exited", 1);
    gateway.send(&turn("s", "t", "x"));
    let ack = gateway.ask(&json!({"type": "shutdown", "request_id": "bye"}));
    assert_eq!(ack["type"], "shutdown.ack");
    assert_eq!(gateway.exit(), Exit::Code(0));
    let terminal = gateway.answer("t");
    assert_eq!(
        (&terminal["reason"], &terminal["execution_state"]),
        (&json!("draining"), &json!("not_started"))
    );
    assert_eq!(
        gateway.frames_of_kind("hello").len(),
        1,
        "no host was started for it"
    );
}

#[test]
fn a_gateway_that_closes_its_reading_end_ends_the_supervisor() {
    let gateway = Gateway::spawn(Supervision::of_fake(&[]).through_shell("\"$@\" | head -n 1"));
    let pid = gateway.host_pid(1);
    let mut gateway = gateway;
    // Whatever the host says next finds nobody.
    gateway.send(&turn("s", "t", "x"));
    assert_eq!(gateway.exit(), Exit::Code(0));
    wait_gone(pid);
}

#[test]
fn a_supervisor_that_is_killed_takes_its_host_with_it() {
    for turn_of in [json!([{"say": "x"}]), json!([{"stuck_ms": 60_000}])] {
        let mut gateway = Gateway::start(Supervision::of_turnhost());
        gateway.send(&script_turn("s", "t", &turn_of));
        gateway.wait_kind("turn.started", 1);
        let pid = gateway.host_pid(1);
        gateway.signal(Signal::KILL);
        assert_eq!(gateway.exit(), Exit::Signal(9));
        wait_gone(pid);
    }
}

#[test]
fn every_process_of_the_session_is_ended_before_the_next_host_is_started() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    gateway.send(&json!({"type": "fake", "do": "grandchild"}));
    let meek = pid_of(&gateway.wait_kind("fake.child", 1)["pid"]);
    gateway.send(&json!({"type": "fake", "do": "grandchild", "deaf": true}));
    let deaf = pid_of(&gateway.wait_kind("fake.child", 2)["pid"]);
    gateway.fake("exit");
    gateway.wait_kind("hello", 2);
    assert!(!lives(meek) && !lives(deaf));
    // Both became children of the supervisor, and are no zombies either.
    wait_gone(meek);
    wait_gone(deaf);
}

#[test]
fn orphans_of_the_host_are_reaped() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    gateway.send(&json!({"type": "fake", "do": "grandchild", "own_session": true}));
    let orphan = pid_of(&gateway.wait_kind("fake.child", 1)["pid"]);
    gateway.fake("exit");
    gateway.wait_kind("hello", 2);
    let parent = Stat::of(orphan).unwrap().unwrap().ppid;
    assert_eq!(parent, gateway.pid(), "the supervisor is its subreaper");
    kill_process(Pid::from_raw(orphan).unwrap(), Signal::KILL).unwrap();
    wait_gone(orphan);
}

#[test]
fn as_init_of_a_container_it_reaps_strangers() {
    let own_pid = ["--map-root-user", "--user"];
    let unshare = |words: &[&str]| {
        let mut command = std::process::Command::new("unshare");
        command
            .args(own_pid)
            .args(["--pid", "--fork", "--mount-proc"])
            .args(words);
        command
    };
    if !unshare(&["true"])
        .status()
        .is_ok_and(|status| status.success())
    {
        eprintln!("skipped: no pid namespaces here");
        return;
    }
    let script = format!(
        "exec unshare {} --pid --fork --mount-proc \"$@\"",
        own_pid.join(" ")
    );
    // Before the host becomes itself it leaves twenty orphans to init, which end a little later.
    let fake = turnhost_tests::binary::fake_host().to_str().unwrap();
    let orphans = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; \
        do (sleep 1 >/dev/null &); done; exec \"$@\"";
    let how = Supervision::of(["sh", "-c", orphans, "sh", fake]);
    let mut gateway = Gateway::start(how.through_shell(&script));
    // Seen from outside, init is the child of `unshare`.
    let init = children(gateway.pid());
    assert_eq!(init.len(), 1);
    let deadline = Instant::now() + Duration::from_secs(20);
    // Zombies are children too; the host alone stays.
    while children(init[0]).len() > 1 {
        let left = children(init[0]);
        assert!(Instant::now() < deadline, "not reaped: {left:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(gateway.ask(&turn("s", "t", "x"))["type"], "turn.end");
    gateway.close_stdin();
    assert_eq!(gateway.exit(), Exit::Code(0));
}

#[test]
fn a_blocked_gateway_holds_up_nothing_else() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    gateway.stop_reading();
    gateway.send(&json!({"type": "fake", "do": "flood", "count": 100_000, "frame": {"type": "x", "y": "z".repeat(80)}}));
    gateway.signal(Signal::TERM);
    // It ends although nobody takes what it still has to say.
    assert!(turnhost_tests::gateway::ends(gateway.pid()));
    gateway.read_on();
    assert_eq!(gateway.exit(), Exit::Code(0));
}

#[test]
fn a_signal_beside_waiting_input_ends_it() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    // Stopped meanwhile, it finds the frame and the signal at once.
    gateway.signal(Signal::STOP);
    let is_stopped = |pid| Stat::of(pid).unwrap().is_some_and(|stat| stat.state == 'T');
    while !is_stopped(gateway.pid()) {
        std::thread::yield_now();
    }
    gateway.send(&turn("s", "t", "x"));
    gateway.signal(Signal::TERM);
    gateway.signal(Signal::CONT);
    assert_eq!(gateway.exit(), Exit::Code(0));
    assert!(matches!(
        gateway.answer("t")["type"].as_str(),
        Some("turn.end" | "turn.error")
    ));
}

#[test]
fn what_was_written_before_a_signal_is_answered_where_no_host_runs() {
    for _ in 0..10 {
        let mut gateway = Gateway::start(Supervision::of_fake(&[]).args(["--respawn-max", "0"]));
        let host = gateway.host_pid(1);
        kill_process(Pid::from_raw(host).unwrap(), Signal::KILL).unwrap();
        gateway.wait_kind("host.gave_up", 1);
        let lines: String = (0..60)
            .map(|index| format!("{}\n", turn("s", &format!("t{index}"), "x")))
            .collect();
        gateway.send_raw(lines.as_bytes());
        gateway.signal(Signal::TERM);
        gateway.exit();
        for index in 0..60 {
            assert_eq!(gateway.answer(&format!("t{index}"))["type"], "turn.error");
        }
    }
}
