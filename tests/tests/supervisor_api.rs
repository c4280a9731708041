//! SPEC §9: the supervisor as a part of another program, with what the recorded reference does
//! wrong (fixtures of its supervisor) done right.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::ffi::OsString;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tempfile::TempDir;
use turnhost_protocol::home::Home;
use turnhost_supervisor::HostSupervisor;
use turnhost_supervisor::core::{EndCode, RespawnRules};
use turnhost_supervisor::relay::{Settings, StartError};
use turnhost_supervisor::supervisor::{CallError, HostFrame, SendError};
use turnhost_tests::binary;
use turnhost_tests::gateway::{lives, wait_gone};

/// Far beyond what a loaded machine needs.
const WAIT: Duration = Duration::from_secs(30);

fn settings(folder: &TempDir, argv: &[&str]) -> Settings {
    let home = Home::find(Some(folder.path().to_owned()), |_| None).unwrap();
    let program = [OsString::from(binary::fake_host())];
    Settings {
        home,
        registry: None,
        argv: program
            .into_iter()
            .chain(argv.iter().map(OsString::from))
            .collect(),
        build_sha: String::new(),
        heartbeat_secs: Some(0.0),
        max_frame_bytes: turnhost_protocol::limits::MAX_FRAME_BYTES,
        respawn: RespawnRules::default(),
        env: Vec::new(),
    }
}

struct Supervised {
    supervisor: HostSupervisor,
    frames: Receiver<HostFrame>,
    _folder: TempDir,
}

fn start(argv: &[&str]) -> Supervised {
    let folder = tempfile::tempdir().unwrap();
    let (sender, frames) = channel();
    let sink = move |frame| drop(sender.send(frame));
    let supervisor = HostSupervisor::start(settings(&folder, argv), sink).unwrap();
    Supervised {
        supervisor,
        frames,
        _folder: folder,
    }
}

impl Supervised {
    fn wait_kind(&self, kind: &str) -> Value {
        loop {
            let frame = self.frames.recv_timeout(WAIT).expect("a frame");
            if frame.kind() == kind {
                return frame.value();
            }
        }
    }

    fn submit(&self, sid: &str, text: &str) -> Receiver<HostFrame> {
        let (sender, completed) = channel();
        let then = move |frame| drop(sender.send(frame));
        let id = self.supervisor.submit_turn(turn(sid, text), then).unwrap();
        assert_eq!(id.len(), 32);
        completed
    }

    fn fake(&self, what: &str) {
        let frame = map(json!({"type": "fake", "do": what, "frame": {"type": "done"}}));
        let supervisor = &self.supervisor;
        // It has no answer but that of a crash: what it does is waited for elsewhere.
        match supervisor.ask(frame, Duration::ZERO) {
            Err(CallError::TimedOut(_)) => {}
            Ok(answer) => assert_eq!(answer.kind(), "error"),
            Err(error) => panic!("{error}"),
        }
    }
}

fn map(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        other => panic!("{other} is no object"),
    }
}

fn turn(sid: &str, text: &str) -> Map<String, Value> {
    map(json!({"sid": sid, "text": text}))
}

fn completed(receiver: &Receiver<HostFrame>) -> Value {
    receiver
        .recv_timeout(WAIT)
        .expect("a terminal frame")
        .value()
}

#[test]
fn turns_complete_once_and_calls_are_answered() {
    let host = start(&[]);
    let turn = host.submit("s1", "x");
    assert_eq!(completed(&turn)["type"], "turn.end");
    assert!(
        turn.recv_timeout(Duration::from_millis(50)).is_err(),
        "once"
    );
    assert!(!host.supervisor.has_pending_turn(None));
    let ack = host.supervisor.interrupt("s1", WAIT).unwrap();
    assert_eq!(ack.kind(), "interrupt.ack");
    let ack = host
        .supervisor
        .respond("s1", &json!({"frame": {}}), WAIT)
        .unwrap();
    assert_eq!(ack.value()["response"]["result"]["status"], "ok");
    let ack = host
        .supervisor
        .control("s1", "session.save", Map::new(), WAIT, None)
        .unwrap();
    assert_eq!(ack.kind(), "control.ack");
    for (route, error) in [
        ("nope", CallError::UnclassifiedRoute("nope".to_owned())),
        (
            "prompt.submit",
            CallError::TurnPath("prompt.submit".to_owned()),
        ),
    ] {
        let refused = host.supervisor.control("s1", route, Map::new(), WAIT, None);
        assert_eq!(refused.unwrap_err(), error);
    }
    let status = host.supervisor.status().unwrap();
    assert_eq!(
        (status.core.phase, status.core.pending_turns),
        ("running", 0)
    );
    let pid = status.host_pid.unwrap();
    assert!(lives(pid));
    assert_eq!(
        host.supervisor.shutdown(Duration::from_secs(2)).unwrap(),
        EndCode::Orderly
    );
    wait_gone(pid);
}

#[test]
fn a_crash_completes_turns_and_fails_calls_at_once() {
    let host = start(&[]);
    let hanging = host.submit("s1", "hang");
    assert!(host.supervisor.has_pending_turn(Some("s1")));
    assert!(!host.supervisor.has_pending_turn(Some("s2")));
    let began = Instant::now();
    std::thread::scope(|scope| {
        let respond = scope.spawn(|| host.supervisor.respond("s1", &json!({"hang": true}), WAIT));
        let control = scope.spawn(|| {
            let fields = map(json!({}));
            host.supervisor
                .control("hang", "session.save", fields, WAIT, None)
        });
        // The control of this session is answered: the respond before it was sent.
        control.join().unwrap().unwrap();
        while host.supervisor.status().unwrap().core.pending_frames < 2 {
            std::thread::yield_now();
        }
        host.fake("abort");
        assert_eq!(respond.join().unwrap().unwrap().kind(), "respond.error");
    });
    assert!(began.elapsed() < WAIT);
    let terminal = completed(&hanging);
    assert_eq!(
        (&terminal["type"], &terminal["reason"]),
        (&json!("turn.error"), &json!("crash"))
    );
    assert_eq!(host.wait_kind("host.exited")["signal"], 6);
    host.wait_kind("hello");
    assert_eq!(completed(&host.submit("s1", "x"))["type"], "turn.end");
}

#[test]
fn a_late_answer_reaches_its_callback_once() {
    let host = start(&[]);
    // A control that the host never answers: its late answer is that of the crash.
    let (sender, late) = channel();
    let callback = Box::new(move |frame: HostFrame| drop(sender.send(frame)));
    let fields = map(json!({"route_name": "hang"}));
    let stuck = host.submit("s", "hang");
    host.fake("stop reading");
    let wait = Duration::from_millis(50);
    let timed_out = host
        .supervisor
        .control("s", "session.save", fields, wait, Some(callback));
    assert_eq!(timed_out.unwrap_err(), CallError::TimedOut(wait));
    let pid = host.supervisor.status().unwrap().host_pid.unwrap();
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    assert_eq!(completed(&late)["type"], "control.error");
    assert_eq!(completed(&stuck)["reason"], "crash");
    assert!(
        late.recv_timeout(Duration::from_millis(50)).is_err(),
        "once"
    );
}

#[test]
fn callbacks_and_sinks_that_panic_stop_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (sender, seen) = channel();
    let sink = move |frame: HostFrame| {
        sender.send(frame.kind().to_owned()).unwrap();
        panic!("a sink that panics at {}", frame.kind());
    };
    let supervisor = HostSupervisor::start(settings(&folder, &[]), sink).unwrap();
    supervisor
        .submit_turn(turn("s", "x"), |_| panic!("a completion that panics"))
        .unwrap();
    let (sender, completed) = channel();
    supervisor
        .submit_turn(turn("s", "x"), move |frame| sender.send(frame).unwrap())
        .unwrap();
    assert_eq!(completed.recv_timeout(WAIT).unwrap().kind(), "turn.end");
    drop(supervisor);
    let kinds: Vec<_> = seen.iter().collect();
    assert_eq!(kinds, ["hello", "turn.accepted", "turn.accepted"]);
}

#[test]
fn a_sink_may_call_the_supervisor_while_frames_pour_in() {
    let folder = tempfile::tempdir().unwrap();
    let (hand_over, handed_over) = channel::<std::sync::Arc<HostSupervisor>>();
    let (sender, answers) = channel();
    let mut handed_over = Some(handed_over);
    let sink = move |frame: HostFrame| {
        if frame.kind() == "flood"
            && let Some(handed_over) = handed_over.take()
        {
            let supervisor = handed_over.recv().unwrap();
            // Far more than fits between the threads is before this answer.
            std::thread::sleep(Duration::from_millis(500));
            let answer = supervisor
                .interrupt("s", WAIT)
                .map(|ack| ack.kind().to_owned());
            let began = Instant::now();
            // The last owner ends it on its own thread.
            drop(supervisor);
            sender.send((answer, began.elapsed())).unwrap();
        }
    };
    let supervisor = HostSupervisor::start(settings(&folder, &[]), sink).unwrap();
    let pid = supervisor.status().unwrap().host_pid.unwrap();
    let flood = map(json!({"type": "fake", "do": "flood", "count": 20_000,
        "frame": {"type": "flood", "text": "x".repeat(100)}}));
    let asked = supervisor.ask(flood, Duration::ZERO);
    assert!(matches!(asked, Err(CallError::TimedOut(_))));
    hand_over.send(std::sync::Arc::new(supervisor)).unwrap();
    let (answer, dropping) = answers.recv_timeout(WAIT + WAIT).unwrap();
    assert_eq!(answer.as_deref(), Ok("interrupt.ack"));
    assert!(dropping < Duration::from_secs(15), "{dropping:?}");
    wait_gone(pid);
}

#[test]
fn a_blocked_host_blocks_no_caller() {
    let host = start(&[]);
    host.fake("stop reading");
    let big = map(json!({"sid": "s", "text": "x".repeat(8 << 20)}));
    let began = Instant::now();
    let mut refused = None;
    let (sender, completions) = channel();
    for _ in 0..40 {
        let sender = sender.clone();
        let then = move |frame: HostFrame| drop(sender.send(frame));
        if let Err(error) = host.supervisor.submit_turn(big.clone(), then) {
            refused = Some(error);
            break;
        }
    }
    // 64 MiB for the host, 64 MiB before it: then a send fails, and says so both ways.
    assert_eq!(refused, Some(SendError::Full));
    let failed = completions.recv_timeout(WAIT).unwrap().value();
    assert_eq!(
        (&failed["reason"], &failed["execution_state"]),
        (&json!("send_failed"), &json!("not_started"))
    );
    assert!(host.supervisor.has_pending_turn(None));
    assert!(began.elapsed() < WAIT);
    let pid = host.supervisor.status().unwrap().host_pid.unwrap();
    drop(host);
    wait_gone(pid);
}

#[test]
fn a_first_host_that_fails_is_an_error_each_time_and_leaves_nothing() {
    for argv in [
        ["--home", "/another"],
        ["--exit", "3"],
        ["--exit-after-hello", "0"],
    ] {
        let folder = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            let started = HostSupervisor::start(settings(&folder, &argv), |_| {});
            match (argv[0], started) {
                ("--exit-after-hello", Ok(supervisor)) => drop(supervisor),
                (_, Err(StartError::FirstHost(message))) => {
                    assert!(
                        message.starts_with("the first host could not be started"),
                        "{message}"
                    );
                }
                (_, other) => panic!("{:?}", other.map(|_| ())),
            }
            assert!(!folder.path().join("state/compute-host.json").exists());
        }
    }
}

#[test]
fn a_home_has_one_supervisor() {
    let host = start(&[]);
    let other = HostSupervisor::start(settings(&host._folder, &[]), |_| {});
    let error = other.map(|_| ()).unwrap_err().to_string();
    let own = std::process::id();
    assert!(
        error.contains(&format!("another supervisor (pid {own}) holds")),
        "{error}"
    );
    assert_eq!(completed(&host.submit("s", "x"))["type"], "turn.end");
}

#[test]
fn given_up_means_an_answer_at_once_and_a_restart_helps() {
    let folder = tempfile::tempdir().unwrap();
    let mut rules = settings(&folder, &[]);
    rules.respawn.max = 0;
    let (sender, frames) = channel();
    let sink = move |frame| drop(sender.send(frame));
    let supervisor = HostSupervisor::start(rules, sink).unwrap();
    let host = Supervised {
        supervisor,
        frames,
        _folder: folder,
    };
    host.fake("exit");
    host.wait_kind("host.gave_up");
    assert_eq!(completed(&host.submit("s", "x"))["reason"], "crash");
    assert_eq!(
        host.supervisor.interrupt("s", WAIT).unwrap().value()["applied"],
        false
    );
    host.supervisor.restart().unwrap();
    host.wait_kind("hello");
    assert_eq!(completed(&host.submit("s", "x"))["type"], "turn.end");
}

#[test]
fn after_the_end_a_turn_fails_to_be_sent() {
    let host = start(&[]);
    let hanging = host.submit("s", "hang");
    let duplicate = map(json!({"sid": "s", "request_id": "same", "text": "hang"}));
    host.supervisor
        .submit_turn(duplicate.clone(), |_| {})
        .unwrap();
    let (sender, completions) = channel();
    let then = move |frame: HostFrame| drop(sender.send(frame));
    let error = host.supervisor.submit_turn(duplicate, then).unwrap_err();
    assert_eq!(error, SendError::DuplicateId);
    assert_eq!(completed(&completions)["reason"], "send_failed");
    let ended = host.supervisor.shutdown(Duration::from_secs(2));
    assert_eq!(ended.unwrap(), EndCode::Orderly);
    assert_eq!(completed(&hanging)["reason"], "draining");
}
