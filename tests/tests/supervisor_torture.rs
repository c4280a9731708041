//! SPEC §9 under fire: hosts that are killed, stopped or gone at random moments, again and again.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::collections::HashMap;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use turnhost_tests::gateway::{Arrival, lives};
use turnhost_tests::{Gateway, Supervision, script_turn, turn};

const SESSIONS: usize = 20;
const ROUNDS: usize = 10;

/// How a host is brought down in the middle of its turns.
#[derive(Clone, Copy, PartialEq)]
enum End {
    Kill,
    Stop,
    ExitZero,
    KillInHandshake,
}

fn signal(pid: i32, signal: Signal) {
    // It may have ended by itself a moment before.
    let _ = kill_process(Pid::from_raw(pid).expect("a pid"), signal);
}

fn kind(frame: &Value) -> &str {
    frame["type"].as_str().unwrap_or_default()
}

fn is_terminal(frame: &Value) -> bool {
    matches!(kind(frame), "turn.end" | "turn.error")
}

/// Facts of a process that must not grow.
fn descriptors_and_threads(pid: i32) -> (usize, usize) {
    let count = |folder: &str| {
        std::fs::read_dir(format!("/proc/{pid}/{folder}"))
            .unwrap()
            .count()
    };
    (count("fd"), count("task"))
}

fn resident_kib(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .unwrap();
    line.split_ascii_whitespace()
        .nth(1)
        .unwrap()
        .parse()
        .unwrap()
}

/// Children of a process that ended and were not reaped.
fn zombies_of(parent: i32) -> Vec<i32> {
    let pids = std::fs::read_dir("/proc").unwrap();
    let pids = pids.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let stat = turnhost_protocol::process::Stat::of(*pid);
        matches!(stat, Ok(Some(stat)) if stat.ppid == parent && stat.is_zombie())
    })
    .collect()
}

fn torture(end: End) {
    let beats = if end == End::Stop { "0.2" } else { "0" };
    let program = turnhost_tests::binary::turnhost().to_str().unwrap();
    // Slow enough in its start to be met in it.
    let words = match end {
        End::KillInHandshake => vec![
            "sh",
            "-c",
            "sleep 0.1; exec \"$@\"",
            "sh",
            program,
            "--allow-faults",
        ],
        _ => vec![program, "--allow-faults"],
    };
    let how = Supervision::of(words).args(["--respawn-max", "100", "--heartbeat-secs", beats]);
    let mut gateway = Gateway::start(how);
    let before = descriptors_and_threads(gateway.pid());
    for round in 0..ROUNDS {
        let hellos = gateway.frames_of_kind("hello").len();
        if end == End::Stop {
            // A host is watched from its first heartbeat on.
            gateway.find("a heartbeat of this host", |arrivals: &[Arrival]| {
                let mut latest = arrivals.iter().rev().map(|arrival| kind(&arrival.frame));
                (latest.find(|kind| matches!(*kind, "hb" | "hello")) == Some("hb")).then_some(())
            });
        }
        let began = gateway.arrivals().len();
        for session in 0..SESSIONS {
            let mut steps =
                vec![json!({"deltas": {"count": 20 + 7 * session, "text": "x ", "every_ms": 1}})];
            if end == End::ExitZero && session == round % SESSIONS {
                steps.push(json!({"exit": 0}));
            }
            let (sid, id) = (format!("s{session}"), format!("t{round}-{session}"));
            gateway.send(&script_turn(&sid, &id, &json!(steps)));
        }
        // A point of the stream that differs in each round.
        let frames = 1 + fastrand::usize(..400);
        gateway.find("a point of the stream", |arrivals: &[Arrival]| {
            let ended = arrivals[began..]
                .iter()
                .filter(|arrival| is_terminal(&arrival.frame));
            (arrivals.len() > began + frames || ended.count() == SESSIONS).then_some(())
        });
        let pid = gateway.host_pid(hellos);
        match end {
            End::Kill => signal(pid, Signal::KILL),
            End::Stop => signal(pid, Signal::STOP),
            End::ExitZero => {}
            End::KillInHandshake => {
                let exits = gateway.frames_of_kind("host.exited").len();
                signal(pid, Signal::KILL);
                gateway.wait_kind("host.exited", exits + 1);
                gateway.send(&json!({"type": "host.restart"}));
                kill_in_handshake(&gateway, pid);
                gateway.wait_kind("host.exited", exits + 2);
            }
        }
        gateway.find("the exit", |arrivals: &[Arrival]| {
            let exits = arrivals[began..]
                .iter()
                .filter(|arrival| kind(&arrival.frame) == "host.exited");
            (exits.count() > 0).then_some(())
        });
        gateway.send(&json!({"type": "host.restart"}));
        for session in 0..SESSIONS {
            gateway.answer(&format!("t{round}-{session}"));
        }
        gateway.wait_kind("hello", hellos + 1);
        assert_eq!(
            gateway.ask(&turn("next", &format!("next{round}"), "works"))["type"],
            "turn.end"
        );
    }
    check_stream(&gateway.frames());
    assert_eq!(descriptors_and_threads(gateway.pid()), before);
    assert_eq!(zombies_of(gateway.pid()), Vec::<i32>::new());
}

/// Kills the next host before it says hello.
fn kill_in_handshake(gateway: &Gateway, old: i32) {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        assert!(
            Instant::now() < deadline,
            "no host in its handshake was seen"
        );
        let record = gateway.record().filter(|record| record["boot_id"] == "");
        let pid = record.and_then(|record| i32::try_from(record["host_pid"].as_i64()?).ok());
        if let Some(pid) = pid.filter(|pid| *pid != old) {
            return signal(pid, Signal::KILL);
        }
        std::thread::yield_now();
    }
}

/// Each turn has one terminal frame, each frame a known request, and within one host the events of
/// each session count up by one.
fn check_stream(frames: &[Value]) {
    let mut terminals: HashMap<String, usize> = HashMap::new();
    let mut last_seq: HashMap<String, u64> = HashMap::new();
    for frame in frames {
        if kind(frame) == "hello" {
            last_seq.clear();
        }
        if let Some(id) = frame["request_id"].as_str() {
            assert!(id.starts_with('t') || id.starts_with("next"), "{frame}");
            *terminals.entry(id.to_owned()).or_default() += usize::from(is_terminal(frame));
        }
        if let Some(seq) = frame["message"]["params"]["seq"].as_u64() {
            let sid = frame["sid"].as_str().unwrap().to_owned();
            let last = last_seq.insert(sid, seq).unwrap_or(0);
            assert_eq!(seq, last + 1, "{frame}");
        }
    }
    assert_eq!(terminals.len(), ROUNDS * (SESSIONS + 1));
    for (id, count) in terminals {
        assert_eq!(count, 1, "{id}");
    }
}

#[test]
fn two_hundred_turns_survive_ten_kills() {
    torture(End::Kill);
}

#[test]
fn two_hundred_turns_survive_ten_stops() {
    torture(End::Stop);
}

#[test]
fn two_hundred_turns_survive_ten_exits_with_code_zero() {
    torture(End::ExitZero);
}

#[test]
fn two_hundred_turns_survive_ten_kills_in_the_handshake() {
    torture(End::KillInHandshake);
}

#[test]
fn a_thousand_restarts_leave_nothing_behind() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]).args(["--respawn-max", "2000"]));
    let mut base = (0, 0, 0);
    for count in 1..=1_000 {
        gateway.fake("exit");
        gateway.wait_kind("host.exited", count);
        gateway.send(&json!({"type": "host.restart"}));
        gateway.wait_kind("hello", count + 1);
        // The first hundred may still warm memory up.
        if count == 100 {
            let (descriptors, threads) = descriptors_and_threads(gateway.pid());
            base = (descriptors, threads, resident_kib(gateway.pid()));
        }
    }
    let (descriptors, threads) = descriptors_and_threads(gateway.pid());
    assert_eq!((descriptors, threads), (base.0, base.1));
    let grown = resident_kib(gateway.pid()).saturating_sub(base.2);
    assert!(grown < 1_024, "memory grew by {grown} KiB in 900 restarts");
    assert_eq!(zombies_of(gateway.pid()), Vec::<i32>::new());
    let state = std::fs::read_dir(gateway.home().join("state")).unwrap();
    assert_eq!(state.count(), 2, "the record and the lock");
    assert!(lives(gateway.host_pid(1_001)));
}
