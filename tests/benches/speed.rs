//! The speed table of DESIGN: each number next to the floor program, in one run, with its goal.
//!
//! `cargo bench -p turnhost-tests --bench speed` prints the table; `README.md` beside this file
//! tells how to read it.

use std::io::Write;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use turnhost_tests::bench::{
    Peer, Table, alternate, micros, millis, percentile, ratio, round_trip,
};
use turnhost_tests::{binary, interrupt, probe, script_turn, turn};

fn main() {
    let mut table = Table::default();
    spawn_to_hello(&mut table);
    let round_trip = cheap_round_trip(&mut table);
    pipelined(&mut table);
    echo_turn(&mut table, round_trip);
    deltas(&mut table);
    interrupts(&mut table);
    history(&mut table);
    memory(&mut table);
    print!("{}", table.text);
}

/// A host in a home of its own.
struct Host {
    peer: Peer,
    _home: tempfile::TempDir,
}

impl Host {
    fn start(args: &[&str]) -> Self {
        let home = tempfile::tempdir().expect("a temporary folder");
        let path = home.path().to_str().expect("a path in UTF-8");
        let fixed = ["--home", path, "--heartbeat-secs", "0"];
        Self {
            peer: Peer::spawn(binary::turnhost(), &[&fixed, args].concat()),
            _home: home,
        }
    }
}

/// How a frame of this type begins, out of a host.
fn head(kind: &str) -> String {
    format!(r#"{{"type":"{kind}""#)
}

fn line(frame: &Value) -> Vec<u8> {
    format!("{frame}\n").into_bytes()
}

fn spawn_to_hello(table: &mut Table) {
    let (mut floor, mut host) = (Vec::new(), Vec::new());
    for _ in 0..60 {
        floor.push(Peer::floor().first_line);
        host.push(Host::start(&[]).peer.first_line);
    }
    let (floor, host) = (percentile(&mut floor, 0.5), percentile(&mut host, 0.5));
    let times = ratio(host, floor);
    table.row(
        "spawn to hello, p50",
        [&millis(floor), &millis(host), &format!("{times:.2}×")],
        "at most 3×",
        times <= 3.0,
    );
}

fn cheap_round_trip(table: &mut Table) -> Duration {
    let frame = line(&probe("r"));
    let (mut floor, mut host) = (Peer::floor(), Host::start(&[]));
    let (floor, host) = alternate(
        20,
        || round_trip(&mut floor, 1000, &frame, ""),
        || round_trip(&mut host.peer, 1000, &frame, &head("error")),
    );
    let times = ratio(host, floor);
    table.row(
        "cheap frame, round trip, p50",
        [&micros(floor), &micros(host), &format!("{times:.2}×")],
        "at most 1.5×",
        times <= 1.5,
    );
    floor
}

fn pipelined(table: &mut Table) {
    const FRAMES: usize = 20_000;
    let frames = line(&probe("r")).repeat(FRAMES);
    let run = |peer: &mut Peer| {
        let start = Instant::now();
        peer.exchange(&frames, |peer| {
            for _ in 0..FRAMES {
                peer.read_line();
            }
        });
        start.elapsed()
    };
    let (mut floor, mut host) = (Peer::floor(), Host::start(&[]));
    let (floor, host) = alternate(30, || run(&mut floor), || run(&mut host.peer));
    let rate = |time: Duration| format!("{:.2} M/s", FRAMES as f64 / time.as_secs_f64() / 1e6);
    let part = 1.0 / ratio(host, floor);
    table.row(
        "20,000 such frames pipelined",
        [&rate(floor), &rate(host), &format!("{part:.2}")],
        "at least 0.25",
        part >= 0.25,
    );
}

fn echo_turn(table: &mut Table, floor: Duration) {
    let mut host = Host::start(&[]);
    let frame = line(&turn("s", "r", "hello"));
    let mut run = |turns| round_trip(&mut host.peer, turns, &frame, &head("turn.end"));
    run(100);
    let time = run(1000);
    let times = ratio(time, floor);
    table.row(
        "echo turn, turn.start to turn.end, p50",
        [&micros(floor), &micros(time), &format!("{times:.2}×")],
        "at most 5×",
        times <= 5.0,
    );
    run(4000);
    let late = run(1000);
    let growth = ratio(late, time);
    table.row(
        "the same after 5,000 turns of the session",
        ["", &micros(late), &format!("{growth:.2}× the first")],
        "at most 1.5× the first",
        growth <= 1.5,
    );
}

fn deltas(table: &mut Table) {
    const COUNT: usize = 100_000;
    let mut host = Host::start(&[]);
    let steps = json!([{"deltas": {"count": COUNT, "text": "word "}}]);
    let frame = line(&script_turn("s", "r", &steps));
    let mut bytes = 0;
    let mut seen = 0;
    let mut times: Vec<_> = (0..10)
        .map(|_| {
            host.peer.write(&frame);
            host.peer.read_to(&head("turn.started"));
            let start = Instant::now();
            bytes = 0;
            seen = 0;
            loop {
                let line = host.peer.read_line();
                bytes += line.len();
                if line.starts_with(br#"{"type":"turn.end""#) {
                    break;
                }
                seen += 1;
            }
            start.elapsed()
        })
        .collect();
    let time = percentile(&mut times, 0.5);
    // The floor moves as many lines of the same length.
    let sample = [vec![b'x'; bytes / COUNT - 1], b"\n".to_vec()].concat();
    let lines = sample.repeat(COUNT);
    let mut floor = Peer::floor();
    let mut times: Vec<_> = (0..10)
        .map(|_| {
            let start = Instant::now();
            floor.exchange(&lines, |peer| {
                for _ in 0..COUNT {
                    peer.read_line();
                }
            });
            start.elapsed()
        })
        .collect();
    let floor = percentile(&mut times, 0.5);
    let rate = |time: Duration| COUNT as f64 / time.as_secs_f64() / 1e6;
    table.row(
        &format!("a turn of 100,000 deltas ({seen} frames)"),
        [
            &format!("{:.2} M/s", rate(floor)),
            &format!("{:.2} M/s", rate(time)),
            &format!("{:.2}", rate(time) / rate(floor)),
        ],
        "at least 1 M/s",
        rate(time) >= 1.0,
    );
}

fn interrupts(table: &mut Table) {
    const WORKERS: usize = 8;
    const FLOODS: usize = 4;
    const SAMPLES: usize = 2000;
    let mut host = Host::start(&["--workers", "8", "--allow-faults"]);
    let peer = &mut host.peer;
    for number in 0..WORKERS {
        let sid = format!("s{number}");
        let steps = if number < FLOODS {
            json!(vec![
                json!({"deltas": {"count": 10_000_000, "text": "word "}});
                50
            ])
        } else {
            json!([{"stuck_ms": 3_600_000}])
        };
        peer.write(&line(&script_turn(&sid, &sid, &steps)));
        peer.read_to(&head("turn.started"));
    }
    let mut stdin = peer.stdin.take().expect("stdin is open");
    let (acked, acks) = mpsc::channel();
    let mut times = thread::scope(|scope| {
        scope.spawn(move || {
            for _ in 0..SAMPLES {
                peer.read_to(&head("interrupt.ack"));
                acked.send(Instant::now()).expect("the other end waits");
            }
        });
        let sample = |number: usize| {
            let frame = line(&interrupt(
                &format!("s{}", WORKERS - 1),
                &number.to_string(),
            ));
            let start = Instant::now();
            stdin.write_all(&frame).expect("the host reads");
            acks.recv().expect("each is answered") - start
        };
        (0..SAMPLES).map(sample).collect::<Vec<_>>()
    });
    let (half, most) = (percentile(&mut times, 0.5), percentile(&mut times, 0.99));
    table.row(
        "interrupt to its ack, workers stuck, output saturated, p99",
        ["", &format!("{} (p50 {})", millis(most), millis(half)), ""],
        "under 5 ms",
        most < Duration::from_millis(5),
    );
}

fn history(table: &mut Table) {
    const TURNS: usize = 64;
    const MESSAGES: usize = 1024;
    const PARAGRAPH: &str =
        "The reader \"never\" waits for a worker, so that nothing stalls behind a slow turn.\n";
    let messages: Vec<Value> = (0..MESSAGES)
        .map(|number| {
            let role = if number % 2 == 0 { "user" } else { "assistant" };
            json!({"role": role, "content": PARAGRAPH.repeat(12)})
        })
        .collect();
    let frames: Vec<u8> = (0..TURNS)
        .flat_map(|number| {
            let mut frame = turn(&format!("s{number}"), &format!("r{number}"), "x");
            frame["history"] = json!(messages);
            line(&frame)
        })
        .collect();
    let take = || {
        let mut host = Host::start(&[]);
        let start = Instant::now();
        host.peer.exchange(&frames, |peer| {
            for _ in 0..TURNS {
                peer.read_to(&head("turn.accepted"));
            }
        });
        start.elapsed()
    };
    let floor = || {
        let mut floor = Peer::spawn(binary::floor(), &["--bytes"]);
        let start = Instant::now();
        floor.exchange(&frames, |peer| {
            for _ in 0..TURNS {
                peer.read_line();
            }
        });
        start.elapsed()
    };
    let (floor, host) = alternate(7, floor, take);
    let rate = |time: Duration| frames.len() as f64 / time.as_secs_f64() / 1e6;
    table.row(
        "1 MiB history in turn.start, taken in",
        [
            &format!("{:.0} MB/s", rate(floor)),
            &format!("{:.0} MB/s", rate(host)),
            &format!("{:.2}", rate(host) / rate(floor)),
        ],
        "at least 500 MB/s",
        rate(host) >= 500.0,
    );
}

fn memory(table: &mut Table) {
    const SESSIONS: usize = 1000;
    let floor = Peer::floor().resident_kib();
    let mut host = Host::start(&[]);
    let after_hello = host.peer.resident_kib();
    table.row(
        "memory after hello",
        [
            &format!("{:.1} MiB", floor / 1024.0),
            &format!("{:.1} MiB", after_hello / 1024.0),
            &format!("{:.2}×", after_hello / floor),
        ],
        "at most 8 MiB",
        after_hello <= 8.0 * 1024.0,
    );
    let mut run = |number: usize| {
        let name = format!("s{number}");
        host.peer.write(&line(&turn(&name, &name, "hello")));
        host.peer.read_to(&head("turn.end"));
        host.peer.resident_kib()
    };
    // The first turns start threads and fill caches; what is asked is what one more costs.
    let warm = (0..SESSIONS / 10).map(&mut run).last().unwrap_or_default();
    let full = (SESSIONS / 10..SESSIONS)
        .map(&mut run)
        .last()
        .unwrap_or_default();
    let each = (full - warm) / (SESSIONS - SESSIONS / 10) as f64;
    table.row(
        "memory of each idle session",
        ["", &format!("{each:.1} KiB"), ""],
        "at most 8 KiB and its history",
        each <= 8.0,
    );
}
