//! What a supervisor in between costs, next to two chained floor programs, in one run.
//!
//! `cargo bench -p turnhost-tests --bench relay` prints the table; `README.md` beside this file
//! tells how to read it.

use std::path::Path;
use std::time::{Duration, Instant};

use turnhost_tests::bench::{Peer, Table, alternate, micros, percentile, ratio, round_trip};
use turnhost_tests::binary;

/// A frame that an echo answers, and that counts as an answer: the supervisor keeps books of it.
const ECHOED: &[u8] = b"{\"type\":\"error\",\"request_id\":\"r1\",\"message\":\"x\"}\n";

/// One that the host itself answers.
const UNKNOWN: &[u8] = b"{\"type\":\"probe\",\"request_id\":\"r1\"}\n";

fn main() {
    let mut table = Table::default();
    latency(&mut table);
    lines(&mut table);
    bytes(&mut table);
    unread(&mut table);
    print!("{}", table.text);
}

/// Two floor programs, one after the other: what goes in comes out after two copies.
fn chain() -> Peer {
    let floor = binary::floor().to_str().expect("a path in UTF-8");
    let mut chain = Peer::spawn(Path::new("sh"), &["-c", "\"$0\" | \"$0\"", floor]);
    // The first line of the first program comes after that of the second.
    chain.read_line();
    chain
}

struct Supervised {
    peer: Peer,
    _home: tempfile::TempDir,
}

impl Supervised {
    /// A supervisor before a floor program, or before the real host.
    fn start(host: &Path) -> Self {
        let home = tempfile::tempdir().expect("a temporary folder");
        let path = home.path().to_str().expect("a path in UTF-8");
        let host = host.to_str().expect("a path in UTF-8");
        let args = ["run", "--home", path, "--heartbeat-secs", "0", "--", host];
        Self {
            peer: Peer::spawn(binary::supervisor(), &args),
            _home: home,
        }
    }
}

fn latency(table: &mut Table) {
    let mut chain = chain();
    let mut before_echo = Supervised::start(binary::floor());
    let mut before_host = Supervised::start(binary::turnhost());
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    // All in turn, so that they see the same machine.
    for _ in 0..30 {
        times[0].push(round_trip(&mut chain, 500, ECHOED, ""));
        times[1].push(round_trip(&mut before_echo.peer, 500, ECHOED, ""));
        times[2].push(round_trip(&mut before_host.peer, 500, UNKNOWN, ""));
    }
    let [floor, echo, host] = times.map(|mut times| percentile(&mut times, 0.5));
    for (what, through) in [
        ("round trip before an echo, p50", echo),
        ("round trip before turnhost, p50", host),
    ] {
        let times = ratio(through, floor);
        table.row(
            what,
            [&micros(floor), &micros(through), &format!("{times:.2}×")],
            "at most 1.5×",
            times <= 1.5,
        );
    }
}

fn exchange(peer: &mut Peer, input: &[u8], lines: usize) -> Duration {
    let start = Instant::now();
    peer.exchange(input, |peer| {
        for _ in 0..lines {
            peer.read_line();
        }
    });
    start.elapsed()
}

fn lines(table: &mut Table) {
    const LINES: usize = 20_000;
    let input = ECHOED.repeat(LINES);
    let (mut chain, mut supervised) = (chain(), Supervised::start(binary::floor()));
    let (floor, through) = alternate(
        20,
        || exchange(&mut chain, &input, LINES),
        || exchange(&mut supervised.peer, &input, LINES),
    );
    let rate = |time: Duration| format!("{:.2} M/s", LINES as f64 / time.as_secs_f64() / 1e6);
    let part = 1.0 / ratio(through, floor);
    let numbers = [&*rate(floor), &rate(through), &format!("{part:.2}")];
    table.row("20,000 such frames pipelined", numbers, "none set", true);
}

fn bytes(table: &mut Table) {
    const FRAMES: usize = 64;
    let text = "x".repeat(1 << 20);
    let frame = format!("{{\"type\":\"error\",\"request_id\":\"r1\",\"message\":\"{text}\"}}\n");
    let input = frame.repeat(FRAMES).into_bytes();
    let (mut chain, mut supervised) = (chain(), Supervised::start(binary::floor()));
    let (floor, through) = alternate(
        5,
        || exchange(&mut chain, &input, FRAMES),
        || exchange(&mut supervised.peer, &input, FRAMES),
    );
    let rate = |time: Duration| format!("{:.0} MiB/s", FRAMES as f64 / time.as_secs_f64());
    let part = 1.0 / ratio(through, floor);
    let numbers = [&*rate(floor), &rate(through), &format!("{part:.2}")];
    table.row("frames of 1 MiB, there and back", numbers, "none set", true);
}

/// The host writes as fast as it can, and the gateway reads nothing.
fn unread(table: &mut Table) {
    let mut supervised = Supervised::start(binary::turnhost());
    let steps = r#"!script [{\"deltas\":{\"count\":400000,\"text\":\"some words \"}}]"#;
    let turn = format!(
        "{{\"type\":\"turn.start\",\"sid\":\"s\",\"request_id\":\"t\",\"text\":\"{steps}\"}}\n"
    );
    supervised.peer.write(turn.as_bytes());
    let mut before = 0.0;
    // Memory that does not grow any more over some looks is what it takes.
    let mut equal = 0;
    while equal < 10 {
        std::thread::sleep(Duration::from_millis(50));
        let now = supervised.peer.resident_kib();
        equal = if now > before { 0 } else { equal + 1 };
        before = now.max(before);
    }
    let shown = format!("{:.1} MiB", before / 1024.0);
    let what = "memory of the supervisor, its gateway reads nothing";
    table.row(what, ["", &shown, ""], "none set", true);
}
