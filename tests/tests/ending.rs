//! SPEC §8: what ends a host, how long it may take, and what is finalized.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use turnhost_tests::host::Exit;
use turnhost_tests::{Frame, Host, Options, interrupt, probe, script_turn, turn};

/// What makes a host end.
#[derive(Debug, Clone, Copy)]
enum Cause {
    Signal(Signal),
    StdinClosed,
    Shutdown { wait_ms: u64 },
}

impl Cause {
    fn apply(self, host: &mut Host) {
        match self {
            Self::Signal(signal) => host.signal(signal),
            Self::StdinClosed => host.close_stdin(),
            Self::Shutdown { wait_ms } => host.send(&shutdown("bye", wait_ms)),
        }
    }

    /// The reason as `end_reason` shows it.
    fn end_reason(self) -> &'static str {
        match self {
            Self::Signal(_) => "compute_host_sigterm",
            Self::StdinClosed => "compute_host_stdin_closed",
            Self::Shutdown { .. } => "compute_host_shutdown",
        }
    }

    /// The budget `wait`.
    fn wait(self) -> Duration {
        match self {
            Self::Signal(_) => Duration::from_secs(10),
            Self::StdinClosed => Duration::from_secs(2),
            Self::Shutdown { wait_ms } => Duration::from_millis(wait_ms),
        }
    }

    /// How long running turns may go on.
    fn drain(self) -> Duration {
        self.wait() - Duration::from_secs(1).min(self.wait() / 2)
    }
}

const CAUSES: [Cause; 5] = [
    Cause::Signal(Signal::TERM),
    Cause::Signal(Signal::INT),
    Cause::Signal(Signal::HUP),
    Cause::StdinClosed,
    Cause::Shutdown { wait_ms: 20_000 },
];

fn shutdown(request_id: &str, wait_ms: u64) -> Value {
    json!({"type": "shutdown", "request_id": request_id, "wait_ms": wait_ms})
}

fn held() -> Value {
    json!([{"delta": "held"}, {"sleep_ms": 3_600_000}])
}

fn stuck() -> Value {
    json!([{"delta": "stuck"}, {"stuck_ms": 3_600_000}])
}

fn sessions(names: &[(&str, &str)]) -> Vec<(String, String)> {
    names
        .iter()
        .map(|(sid, reason)| ((*sid).to_owned(), (*reason).to_owned()))
        .collect()
}

/// Checks the terminal frame of a turn that the drain gave up.
fn check_given_up(host: &Host, request_id: &str, execution_state: &str) {
    let error = host.answer(request_id);
    assert_eq!(error.kind(), "turn.error", "{}", error.line());
    assert_eq!(
        (&error["reason"], &error["execution_state"]),
        (&json!("draining"), &json!(execution_state))
    );
}

#[test]
fn an_idle_host_ends_at_once_and_finalizes_its_sessions() {
    for cause in CAUSES {
        let mut host = Host::start(Options::new());
        host.ask(&turn("a", "ra", "x"));
        host.ask(&turn("b", "rb", "x"));
        let start = Instant::now();
        cause.apply(&mut host);
        assert_eq!(host.exit(), Exit::Code(0), "{cause:?}");
        assert!(start.elapsed() < cause.drain(), "it waits for nobody");
        let reason = cause.end_reason();
        assert_eq!(host.finalized(), sessions(&[("a", reason), ("b", reason)]));
        assert!(host.stderr().contains("session finalized"), "{cause:?}");
    }
}

#[test]
fn a_host_without_sessions_ends_at_once() {
    for cause in CAUSES {
        let mut host = Host::start(Options::new());
        cause.apply(&mut host);
        assert_eq!(host.exit(), Exit::Code(0), "{cause:?}");
        assert_eq!(host.finalized(), []);
    }
}

#[test]
fn a_turn_that_finishes_is_drained_before_its_session_is_finalized() {
    for cause in CAUSES {
        let mut host = Host::start(Options::new());
        let steps = json!([{"delta": "a"}, {"sleep_ms": 300}, {"delta": "b"}]);
        host.send(&script_turn("s", "r", &steps));
        host.wait_event("s", "message.delta");
        cause.apply(&mut host);
        let end = host.answer("r");
        assert_eq!(
            (end.kind(), &end["interrupted"]),
            ("turn.end", &json!(false)),
            "{cause:?}"
        );
        assert_eq!(host.exit(), Exit::Code(0), "{cause:?}");
        let complete = host.wait_event("s", "message.complete");
        assert_eq!(complete.payload()["text"], "ab");
        assert_eq!(host.finalized(), sessions(&[("s", cause.end_reason())]));
    }
}

/// A turn that outlives the drain keeps its session recoverable and costs no other session its
/// finalize; the drain uses its whole window and the host is gone before `wait` is over.
fn check_stuck(cause: Cause) {
    let mut host = Host::start(Options::with_faults());
    host.ask(&turn("idle", "done", "x"));
    host.send(&script_turn("live", "r", &stuck()));
    host.wait_started("r");
    let start = Instant::now();
    cause.apply(&mut host);
    assert_eq!(host.exit(), Exit::Code(0), "{cause:?}");
    let took = start.elapsed();
    check_given_up(&host, "r", "unknown");
    assert_eq!(host.finalized(), sessions(&[("idle", cause.end_reason())]));
    assert!(
        took >= cause.drain(),
        "{cause:?} used {took:?} of its window"
    );
    assert!(took < cause.wait(), "{cause:?} took {took:?}");
}

#[test]
fn sigterm_leaves_the_session_of_a_stuck_turn() {
    check_stuck(Cause::Signal(Signal::TERM));
}

#[test]
fn closed_stdin_leaves_the_session_of_a_stuck_turn() {
    check_stuck(Cause::StdinClosed);
}

#[test]
fn shutdown_leaves_the_session_of_a_stuck_turn() {
    check_stuck(Cause::Shutdown { wait_ms: 3_000 });
}

#[test]
fn a_short_wait_is_halved_between_drain_and_reserve() {
    let cause = Cause::Shutdown { wait_ms: 340 };
    let mut host = Host::start(Options::with_faults());
    host.ask(&turn("idle", "done", "x"));
    host.send(&script_turn("live", "r", &stuck()));
    host.wait_started("r");
    let start = Instant::now();
    cause.apply(&mut host);
    assert_eq!(host.exit(), Exit::Code(0));
    assert!(start.elapsed() >= Duration::from_millis(170));
    check_given_up(&host, "r", "unknown");
    assert_eq!(
        host.finalized(),
        sessions(&[("idle", "compute_host_shutdown")])
    );
}

#[test]
fn no_wait_at_all_gives_up_at_once() {
    let mut host = Host::start(Options::with_faults());
    host.send(&script_turn("live", "r", &stuck()));
    host.wait_started("r");
    host.send(&shutdown("bye", 0));
    host.exit();
    assert_eq!(host.finalized(), []);
}

#[test]
fn the_drain_wakes_when_the_last_turn_ends() {
    let cause = Cause::Shutdown { wait_ms: 60_000 };
    let mut host = Host::start(Options::new());
    host.send(&script_turn("s", "r", &held()));
    host.wait_started("r");
    cause.apply(&mut host);
    host.answer("bye");
    // Interrupts are answered during the drain as well.
    assert_eq!(host.ask(&interrupt("s", "i"))["applied"], true);
    assert_eq!(host.answer("r")["interrupted"], true);
    // Well before the 59 s that turns may take: the deadline of the harness says so.
    assert_eq!(host.exit(), Exit::Code(0));
    assert_eq!(
        host.finalized(),
        sessions(&[("s", "compute_host_shutdown")])
    );
}

#[test]
fn wait_ms_is_bounded() {
    let mut host = Host::start(Options::new());
    host.send(&shutdown("bye", u64::MAX));
    assert_eq!(host.answer("bye").kind(), "shutdown.ack");
    assert_eq!(host.exit(), Exit::Code(0));
}

#[test]
fn no_turn_is_admitted_while_draining() {
    let mut host = Host::start(Options::with_faults().args(["--workers", "2"]));
    for sid in ["a", "b"] {
        host.send(&script_turn(sid, sid, &stuck()));
        host.wait_started(sid);
    }
    host.send(&turn("queued", "queued", "x"));
    host.send(&shutdown("bye", 3_000));
    host.answer("bye");
    check_too_late(&host, &host.ask(&turn("new", "new", "x")));
    assert_eq!(host.ask(&probe("still answered"))["code"], "unknown_type");
    assert_eq!(host.exit(), Exit::Code(0));
    // What was queued never ran, which is certain; the others are not.
    check_given_up(&host, "queued", "not_started");
    check_given_up(&host, "a", "unknown");
    check_given_up(&host, "b", "unknown");
}

/// Checks the refusal of a turn that came too late.
fn check_too_late(host: &Host, refused: &Frame) {
    assert_eq!(
        (refused.kind(), &refused["reason"]),
        ("turn.error", &json!("draining"))
    );
    assert_eq!(refused["execution_state"], "not_started");
    assert!(host.is_running());
}

#[test]
fn no_turn_is_admitted_after_a_signal() {
    let mut host = Host::start(Options::new());
    host.send(&script_turn("s", "r", &held()));
    host.wait_started("r");
    host.signal(Signal::TERM);
    // The signal and the frames race; one of them is the first that is refused.
    for number in 0.. {
        let id = format!("r{number}");
        let answer = host.ask(&turn(&id, &id, "x"));
        if answer.kind() == "turn.error" {
            check_too_late(&host, &answer);
            break;
        }
    }
    host.ask(&interrupt("s", "i"));
    assert_eq!(host.exit(), Exit::Code(0));
}

#[test]
fn the_first_cause_decides_and_later_ones_change_nothing() {
    let first = Cause::Shutdown { wait_ms: 3_000 };
    let mut host = Host::start(Options::with_faults());
    host.ask(&turn("idle", "done", "x"));
    host.send(&script_turn("live", "r", &stuck()));
    host.wait_started("r");
    let start = Instant::now();
    first.apply(&mut host);
    host.answer("bye");
    for signal in [Signal::TERM, Signal::TERM, Signal::INT, Signal::HUP] {
        host.signal(signal);
    }
    host.send(&shutdown("again", 60_000));
    assert_eq!(host.answer("again").kind(), "shutdown.ack");
    host.close_stdin();
    assert_eq!(host.exit(), Exit::Code(0));
    let took = start.elapsed();
    assert!(took >= first.drain(), "not shorter: {took:?}");
    assert!(took < first.wait(), "not longer: {took:?}");
    assert_eq!(
        host.finalized(),
        sessions(&[("idle", "compute_host_shutdown")])
    );
}

#[test]
fn a_second_signal_lets_a_turn_finish() {
    let mut host = Host::start(Options::new());
    let steps = json!([{"delta": "a"}, {"sleep_ms": 500}, {"delta": "b"}]);
    host.send(&script_turn("s", "r", &steps));
    host.wait_event("s", "message.delta");
    for _ in 0..10 {
        host.signal(Signal::TERM);
    }
    assert_eq!(host.answer("r").kind(), "turn.end");
    assert_eq!(host.exit(), Exit::Code(0));
    assert_eq!(host.finalized(), sessions(&[("s", "compute_host_sigterm")]));
}

#[test]
fn a_deadline_that_passes_while_stopped_counts_as_passed() {
    let wait = Duration::from_millis(5_000);
    let mut host = Host::start(Options::with_faults());
    host.send(&script_turn("s", "r", &stuck()));
    host.wait_started("r");
    host.send(&shutdown("bye", 5_000));
    host.answer("bye");
    host.signal(Signal::STOP);
    // Time itself is the subject: the deadline passes while the host stands still.
    std::thread::sleep(wait + Duration::from_millis(200));
    assert!(host.is_running());
    let start = Instant::now();
    host.signal(Signal::CONT);
    host.exit();
    let took = start.elapsed();
    assert!(
        took < Duration::from_secs(3),
        "it began to wait anew: {took:?}"
    );
}

#[test]
fn a_stopped_host_ends_when_it_goes_on() {
    let mut host = Host::start(Options::new());
    host.ask(&turn("s", "r", "x"));
    host.signal(Signal::STOP);
    host.signal(Signal::TERM);
    host.signal(Signal::CONT);
    assert_eq!(host.exit(), Exit::Code(0));
    assert_eq!(host.finalized(), sessions(&[("s", "compute_host_sigterm")]));
}

/// A parent that starts the host and waits; the test holds the pipes, so that its death closes
/// nothing.
const PARENT: &str = r#""$@" <&3 3<&- & wait"#;

fn orphan_frame(host: &Host) -> Option<Value> {
    host.frames()
        .iter()
        .find(|frame| frame.kind() == "orphan")
        .map(|frame| frame.value().clone())
}

#[test]
fn a_dead_parent_ends_the_host_though_the_pipes_stay_open() {
    let mut host = Host::start(Options::new().shell(PARENT));
    let parent = host.child_pid().as_raw_nonzero().get();
    host.ask(&turn("s", "r", "x"));
    host.kill_shell();
    host.wait_end();
    let orphan = orphan_frame(&host).expect("an orphan frame is tried first");
    assert_eq!(orphan["old_ppid"], parent);
    assert_ne!(orphan["ppid"], parent);
    assert_eq!(host.finalized(), sessions(&[("s", "compute_host_orphan")]));
}

#[test]
fn a_dead_parent_lets_a_turn_finish() {
    let mut host = Host::start(Options::new().shell(PARENT));
    let steps = json!([{"delta": "a"}, {"sleep_ms": 2_000}, {"delta": "b"}]);
    host.send(&script_turn("s", "r", &steps));
    host.wait_event("s", "message.delta");
    host.kill_shell();
    host.wait_end();
    assert_eq!(host.answer("r")["interrupted"], false);
    assert_eq!(host.finalized(), sessions(&[("s", "compute_host_orphan")]));
}

#[test]
fn a_dead_parent_ends_a_host_with_a_stuck_turn() {
    let mut host = Host::start(Options::with_faults().shell(PARENT));
    host.ask(&turn("idle", "done", "x"));
    host.send(&script_turn("live", "r", &stuck()));
    host.wait_started("r");
    let start = Instant::now();
    host.kill_shell();
    host.wait_end();
    // It is looked at each second, and has 10 s from then on.
    let took = start.elapsed();
    assert!(took >= Duration::from_secs(9), "the whole window: {took:?}");
    assert!(
        took < Duration::from_secs(12),
        "no more than its wait: {took:?}"
    );
    check_given_up(&host, "r", "unknown");
    assert_eq!(
        host.finalized(),
        sessions(&[("idle", "compute_host_orphan")])
    );
}

#[test]
fn the_parent_death_signal_ends_the_host() {
    let parent = r#""$@" --parent-death-signal $$ <&3 3<&- & wait"#;
    let mut host = Host::start(Options::new().shell(parent));
    host.ask(&turn("s", "r", "x"));
    host.kill_shell();
    host.wait_end();
    let orphan = orphan_frame(&host).expect("an orphan frame is tried first");
    assert_eq!(orphan["old_ppid"], host.child_pid().as_raw_nonzero().get());
    assert_eq!(host.finalized(), sessions(&[("s", "compute_host_orphan")]));
}

#[test]
fn a_parent_that_was_gone_before_the_signal_was_armed_is_noticed() {
    // It names a process that its parent cannot be.
    let parent = r#""$@" --parent-death-signal 2147483647 <&3 3<&- & wait"#;
    let host = Host::spawn(Options::new().shell(parent));
    host.wait_for("orphan", |frame| frame.kind() == "orphan");
}

#[test]
fn a_closed_stdout_ends_the_host() {
    let mut host = Host::start(Options::new());
    host.ask(&turn("s", "r", "x"));
    host.close_output();
    host.send(&turn("s", "r2", "nobody reads this"));
    let start = Instant::now();
    host.exit();
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(host.stderr().contains("stdout"), "it says why");
    assert_eq!(host.finalized().len(), 1);
}

#[test]
fn an_input_that_cannot_be_read_is_an_end_of_input() {
    for input in ["</", "<&-", "</dev/null"] {
        let mut host = Host::spawn(Options::new().shell(&format!(r#"exec "$@" {input}"#)));
        host.hello();
        assert_eq!(host.exit(), Exit::Code(0), "{input}");
    }
}

#[test]
fn an_output_that_takes_nothing_ends_the_host() {
    let script = r#"exec "$@" <&3 >/dev/full"#;
    let mut host = Host::spawn(Options::new().shell(script));
    host.exit();
    assert!(host.stderr().contains("stdout"), "it says why");
}

#[test]
fn a_parent_that_does_not_read_does_not_keep_the_host() {
    for cause in [
        Cause::StdinClosed,
        Cause::Shutdown { wait_ms: 2_000 },
        Cause::Signal(Signal::TERM),
    ] {
        let mut host = Host::start(Options::new());
        host.ask(&turn("idle", "done", "x"));
        host.stop_reading();
        let flood = json!([{"deltas": {"count": 1_000_000, "text": "0123456789"}}]);
        host.send(&script_turn("s", "r", &flood));
        host.wait_quiet();
        let start = Instant::now();
        cause.apply(&mut host);
        host.exit();
        let took = start.elapsed();
        // The hard deadline takes no lock, and needs a moment of the machine's time.
        let limit = cause.wait() + Duration::from_secs(1);
        assert!(took < limit, "{cause:?} took {took:?}");
        let finalized = host.finalized();
        assert_eq!(finalized, sessions(&[("idle", cause.end_reason())]));
    }
}

#[test]
fn a_parent_that_does_not_read_and_floods_does_not_keep_the_host() {
    let mut host = Host::start(Options::new());
    host.stop_reading();
    for number in 0..20_000 {
        host.send(&probe(&format!("{number:0>8000}")));
    }
    host.wait_quiet();
    let start = Instant::now();
    // The reader stands still, so the end of input is not seen; a signal is.
    host.signal(Signal::TERM);
    host.exit();
    assert!(start.elapsed() < Duration::from_secs(11));
}

#[test]
fn turns_that_came_before_the_end_of_input_run() {
    // Workers are free: that one did not take the turn yet is no reason to give it up.
    for _ in 0..30 {
        let mut host = Host::start(Options::new());
        let turns = ["a", "b", "c"].map(|sid| format!("{}\n", turn(sid, sid, "x")));
        host.send_raw(turns.concat());
        host.close_stdin();
        assert_eq!(host.exit(), Exit::Code(0));
        for id in ["a", "b", "c"] {
            let end = host.answer(id);
            assert_eq!(end.kind(), "turn.end", "{}", end.line());
        }
        assert_eq!(host.finalized().len(), 3);
    }
}

#[test]
fn what_came_before_the_end_of_input_is_answered() {
    let mut host = Host::start(Options::new());
    for number in 0..100 {
        host.send(&probe(&format!("p{number}")));
    }
    // The last line has no end.
    host.send_raw(probe("unfinished").to_string());
    host.close_stdin();
    assert_eq!(host.exit(), Exit::Code(0));
    for number in 0..100 {
        host.answer(&format!("p{number}"));
    }
    host.answer("unfinished");
}

#[test]
fn a_kill_is_seen_as_one() {
    let mut host = Host::start(Options::new());
    host.send(&script_turn("s", "r", &held()));
    host.wait_started("r");
    host.signal(Signal::KILL);
    assert_eq!(host.exit(), Exit::Signal(Signal::KILL.as_raw()));
}

#[test]
fn a_turn_right_behind_a_shutdown_is_refused() {
    for is_busy in [false, true].repeat(10) {
        let mut host = Host::start(Options::new());
        if is_busy {
            host.send(&script_turn("live", "live", &held()));
            host.wait_started("live");
        }
        let (end, late) = (shutdown("bye", 400), turn("late", "late", "x"));
        host.send_raw(format!("{end}\n{late}\n"));
        assert_eq!(host.exit(), Exit::Code(0));
        assert_eq!(host.answer("bye").kind(), "shutdown.ack");
        check_given_up(&host, "late", "not_started");
        assert_eq!(host.frames_with_id("late").len(), 1, "it was not accepted");
    }
}

#[test]
fn no_wait_at_all_still_tells_how_a_turn_ended() {
    for _ in 0..20 {
        let mut host = Host::start(Options::new());
        host.send(&script_turn("live", "r", &held()));
        host.wait_started("r");
        host.send(&shutdown("bye", 0));
        assert_eq!(host.exit(), Exit::Code(0));
        assert_eq!(host.answer("bye").kind(), "shutdown.ack");
        let ends = host
            .frames_with_id("r")
            .iter()
            .filter(|frame| frame.is_terminal())
            .count();
        assert_eq!(ends, 1);
    }
}

#[test]
fn a_parent_that_hangs_up_unread_does_not_keep_the_host() {
    let mut host = Host::start(Options::new());
    host.stop_reading();
    for number in 0..12_000 {
        host.send(&probe(&format!("{number:0>8000}")));
    }
    host.wait_quiet();
    // The reader stands still, with input of this parent before it. It looks each second whether
    // the parent is there, and the end of input then has its 2 s.
    let start = Instant::now();
    host.hang_up();
    host.exit();
    let took = start.elapsed();
    assert!(took < Duration::from_secs(15), "{took:?}");
}

#[test]
fn a_signal_that_the_parent_had_blocked_ends_the_host() {
    // A mask is inherited.
    let blocked = r#"exec python3 -c '
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
os.execv(sys.argv[1], sys.argv[1:])' "$@" <&3 3<&-"#;
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let mut host = Host::start(Options::new().shell(blocked));
        host.ask(&turn("s", "r", "x"));
        host.signal(signal);
        assert_eq!(host.exit(), Exit::Code(0), "{signal:?}");
        assert_eq!(host.finalized(), sessions(&[("s", "compute_host_sigterm")]));
    }
}

#[test]
fn a_hangup_that_was_ignored_at_the_start_ends_nothing() {
    let nohup = r#"trap "" HUP; exec "$@" <&3 3<&-"#;
    let mut host = Host::start(Options::new().shell(nohup));
    host.ask(&turn("s", "r", "x"));
    for number in 0..3 {
        host.signal(Signal::HUP);
        // It would take no turn if it had begun to end.
        host.wait_quiet();
        let id = format!("r{number}");
        assert_eq!(host.ask(&turn("s", &id, "x")).kind(), "turn.end");
    }
    host.signal(Signal::TERM);
    assert_eq!(host.exit(), Exit::Code(0));
}
