//! What the benchmarks share: programs at the other end of two pipes, and the table of results.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::binary;

/// The table, as markdown.
pub struct Table {
    /// What was written so far.
    pub text: String,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            text: "| what | floor | turnhost | ratio | goal | met |\n\
                   | --- | ---: | ---: | ---: | --- | --- |\n"
                .to_owned(),
        }
    }
}

impl Table {
    /// Adds a line: floor, measured, ratio.
    pub fn row(&mut self, what: &str, numbers: [&str; 3], goal: &str, met: bool) {
        let [floor, host, ratio] = numbers;
        let met = if met { "yes" } else { "**no**" };
        let _ = writeln!(
            self.text,
            "| {what} | {floor} | {host} | {ratio} | {goal} | {met} |"
        );
    }
}

/// A program at the other end of two pipes, without anything between.
pub struct Peer {
    child: Child,
    /// Its input, until a thread takes it.
    pub stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    line: Vec<u8>,
    /// From before its start to its first line.
    pub first_line: Duration,
}

impl Peer {
    /// Starts a program and waits for its first line.
    ///
    /// # Panics
    /// It cannot be started, or writes nothing.
    #[must_use]
    pub fn spawn(program: &Path, args: &[&str]) -> Self {
        let start = Instant::now();
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("the program can be started");
        let stdin = child.stdin.take();
        let stdout = child.stdout.take().expect("stdout is piped");
        let mut peer = Self {
            child,
            stdin,
            stdout: BufReader::with_capacity(256 * 1024, stdout),
            line: Vec::new(),
            first_line: Duration::ZERO,
        };
        peer.read_line();
        peer.first_line = start.elapsed();
        peer
    }

    /// The floor program.
    #[must_use]
    pub fn floor() -> Self {
        Self::spawn(binary::floor(), &[])
    }

    /// Writes bytes, waiting where the pipe is full.
    ///
    /// # Panics
    /// The program ended.
    pub fn write(&mut self, bytes: &[u8]) {
        let stdin = self.stdin.as_mut().expect("stdin is open");
        stdin.write_all(bytes).expect("the program reads");
    }

    /// The next line, with its end.
    ///
    /// # Panics
    /// The program ended.
    pub fn read_line(&mut self) -> &[u8] {
        self.line.clear();
        let read = self.stdout.read_until(b'\n', &mut self.line);
        assert!(read.is_ok_and(|count| count > 0), "the output ended");
        &self.line
    }

    /// Reads up to and with the first line that begins like this.
    pub fn read_to(&mut self, head: &str) {
        while !self.read_line().starts_with(head.as_bytes()) {}
    }

    /// Writes `bytes` from a thread of its own, and meanwhile lets `read` read.
    ///
    /// # Panics
    /// The program ended.
    pub fn exchange<T>(&mut self, bytes: &[u8], read: impl FnOnce(&mut Self) -> T) -> T {
        let mut stdin = self.stdin.take().expect("stdin is open");
        thread::scope(|scope| {
            let writer = scope.spawn(move || {
                stdin.write_all(bytes).expect("the program reads");
                stdin
            });
            let result = read(self);
            self.stdin = writer.join().ok();
            result
        })
    }

    /// Its memory in RAM, in KiB.
    ///
    /// # Panics
    /// The program ended.
    #[must_use]
    pub fn resident_kib(&self) -> f64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).expect("the program runs");
        status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"))
            .and_then(|number| number.trim().parse().ok())
            .expect("/proc tells memory in kB")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // A host with stuck turns would drain them first.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The value that `part` of the samples do not exceed.
pub fn percentile(samples: &mut [Duration], part: f64) -> Duration {
    samples.sort_unstable();
    let last = samples.len() - 1;
    samples[(last as f64 * part).round() as usize]
}

/// Microseconds, for the table.
#[must_use]
pub fn micros(time: Duration) -> String {
    format!("{:.1} µs", time.as_secs_f64() * 1e6)
}

/// Milliseconds, for the table.
#[must_use]
pub fn millis(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}

/// How much longer the first took.
#[must_use]
pub fn ratio(host: Duration, floor: Duration) -> f64 {
    host.as_secs_f64() / floor.as_secs_f64()
}

/// The median time from a frame to the line that begins like `end`.
pub fn round_trip(peer: &mut Peer, samples: usize, frame: &[u8], end: &str) -> Duration {
    let mut times = Vec::with_capacity(samples);
    for _ in 0..samples {
        let start = Instant::now();
        peer.write(frame);
        peer.read_to(end);
        times.push(start.elapsed());
    }
    percentile(&mut times, 0.5)
}

/// Takes turns between the two, so that both see the same machine, and gives the medians.
pub fn alternate(
    rounds: usize,
    mut one: impl FnMut() -> Duration,
    mut two: impl FnMut() -> Duration,
) -> (Duration, Duration) {
    let mut pairs: (Vec<_>, Vec<_>) = (0..rounds).map(|_| (one(), two())).unzip();
    (percentile(&mut pairs.0, 0.5), percentile(&mut pairs.1, 0.5))
}
