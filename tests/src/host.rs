//! A real host at the other end of two pipes.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;
use tempfile::TempDir;
use turnhost_protocol::limits;

use crate::binary;
use crate::frame::{Frame, Order};

/// After this long a wait has failed. It is far beyond what a loaded machine needs.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Bytes of a line that a report shows.
const SHOWN_BYTES: usize = 400;

/// Lines that a report shows.
const SHOWN_LINES: usize = 300;

/// How a host is started.
#[derive(Debug, Default, Clone)]
pub struct Options {
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    home: Option<PathBuf>,
    without_home_flag: bool,
    shell: Option<String>,
    max_frame_bytes: Option<usize>,
    heartbeat_secs: Option<String>,
}

impl Options {
    /// A host in a home of its own, without heartbeats. `Options::default()` gives no flag at all
    /// but the home.
    #[must_use]
    pub fn new() -> Self {
        Self::default().heartbeat_secs("0")
    }

    /// Sets `--heartbeat-secs`.
    #[must_use]
    pub fn heartbeat_secs(mut self, seconds: &str) -> Self {
        self.heartbeat_secs = Some(seconds.to_owned());
        self
    }

    /// The same, which also plays the steps that break a host on purpose.
    #[must_use]
    pub fn with_faults() -> Self {
        Self::new().args(["--allow-faults"])
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds a variable. The host sees `PATH`, `HOME` (its home) and what is added, nothing else.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Uses `home`, which outlives the host.
    #[must_use]
    pub fn home(mut self, home: impl Into<PathBuf>) -> Self {
        self.home = Some(home.into());
        self
    }

    /// Leaves `--home` out: the environment tells the home.
    #[must_use]
    pub fn without_home_flag(mut self) -> Self {
        self.without_home_flag = true;
        self
    }

    /// Sets `--max-frame-bytes`, and holds the host to it.
    #[must_use]
    pub fn max_frame_bytes(mut self, bytes: usize) -> Self {
        self.max_frame_bytes = Some(bytes);
        self.args(["--max-frame-bytes".to_owned(), bytes.to_string()])
    }

    /// Lets a shell start the host, which is then no child of the test. `script` finds the host's
    /// command line in `"$@"`, and descriptor 3 is the standard input that the host should get (a
    /// shell gives `/dev/null` to what it starts with `&`).
    #[must_use]
    pub fn shell(mut self, script: &str) -> Self {
        self.shell = Some(format!("exec 3<&0; {script}"));
        self
    }
}

/// A running host, its pipes and everything that came out of it.
#[derive(Debug)]
pub struct Host {
    home: PathBuf,
    child: Child,
    child_fd: OwnedFd,
    /// Whether the child was waited for, and its pid is free again.
    reaped: bool,
    /// The host itself, where a shell stands between: it is known from `hello` on.
    behind_shell: Option<OwnedFd>,
    shared: Arc<Shared>,
    input: Option<Sender<Vec<u8>>>,
    threads: Vec<JoinHandle<()>>,
    // Last, so that the folder goes when the process is gone.
    _own_home: Option<TempDir>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    frames: Vec<Arc<Frame>>,
    order: Order,
    faults: Vec<String>,
    transcript: VecDeque<String>,
    stderr: Vec<u8>,
    bytes_sent: u64,
    reading_stopped: bool,
    closing_output: bool,
    output_ended: bool,
    /// Whether reading was ever stopped: a host that ends while its pipe is full cannot finish the
    /// line that it was writing.
    may_tear: bool,
    log_ended: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state
            .lock()
            .expect("no thread of the harness panics while it holds the state")
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }
}

impl State {
    fn note(&mut self, arrow: &str, line: &[u8]) {
        if self.transcript.len() == SHOWN_LINES {
            self.transcript.pop_front();
        }
        let shown = &line[..line.len().min(SHOWN_BYTES)];
        let mut entry = format!("{arrow} {}", String::from_utf8_lossy(shown).trim_end());
        if shown.len() < line.len() {
            let _ = write!(entry, " … ({} bytes)", line.len());
        }
        self.transcript.push_back(entry);
    }
}

impl Host {
    /// Starts a host and waits for its `hello`.
    #[must_use]
    pub fn start(options: Options) -> Self {
        let mut host = Self::spawn(options);
        let hello = host.hello();
        let host_pid = pid_of(&hello["host_pid"]);
        if host_pid != host.child_pid() {
            let fd = pidfd_open(host_pid, PidfdFlags::empty()).expect("the host runs");
            host.behind_shell = Some(fd);
        }
        host
    }

    /// Starts a host that may end at once.
    #[must_use]
    pub fn spawn(options: Options) -> Self {
        let own_home = match options.home {
            None => Some(tempfile::tempdir().expect("a temporary folder")),
            Some(_) => None,
        };
        let home = match (&own_home, options.home) {
            (_, Some(home)) => home,
            (Some(folder), None) => folder.path().to_owned(),
            (None, None) => unreachable!("one of the two is there"),
        };
        let mut command = match &options.shell {
            None => Command::new(binary::turnhost()),
            Some(script) => {
                let mut command = Command::new("sh");
                command.args(["-c", script, "sh"]).arg(binary::turnhost());
                command
            }
        };
        if !options.without_home_flag {
            command.arg("--home").arg(&home);
        }
        if let Some(seconds) = &options.heartbeat_secs {
            command.args(["--heartbeat-secs", seconds]);
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut child = command
            .args(options.args)
            .env_clear()
            .env("PATH", path)
            .env("HOME", &home)
            .envs(options.env)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the host can be started");
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(stdin), Some(stdout), Some(stderr)) = pipes else {
            unreachable!("all three are piped");
        };
        let shared = Arc::new(Shared::default());
        let (input, lines) = mpsc::channel();
        let max_frame_bytes = options.max_frame_bytes.unwrap_or(limits::MAX_FRAME_BYTES);
        let threads = vec![
            start_thread("host stdin", &shared, move |shared| {
                write_input(shared, stdin, &lines);
            }),
            start_thread("host stdout", &shared, move |shared| {
                read_output(shared, stdout, max_frame_bytes);
            }),
            start_thread("host stderr", &shared, |shared| read_log(shared, stderr)),
        ];
        let child_pid = Pid::from_child(&child);
        Self {
            home,
            child_fd: pidfd_open(child_pid, PidfdFlags::empty())
                .expect("a child that was not reaped has a pidfd"),
            child,
            reaped: false,
            behind_shell: None,
            shared,
            input: Some(input),
            threads,
            _own_home: own_home,
        }
    }

    /// The first frame.
    pub fn hello(&self) -> Arc<Frame> {
        self.wait_for("hello", |frame| frame.kind() == "hello")
    }

    /// Its home.
    #[must_use]
    pub fn home(&self) -> &Path {
        &self.home
    }

    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> Pid {
        if self.behind_shell.is_some() {
            pid_of(&self.hello()["host_pid"])
        } else {
            self.child_pid()
        }
    }

    /// The pid of what the test started: the host, or the shell before it.
    #[must_use]
    pub fn child_pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Writes a frame. Never waits: a thread does the writing.
    pub fn send(&self, frame: &Value) {
        self.send_line(&frame.to_string());
    }

    /// Writes a line.
    pub fn send_line(&self, line: &str) {
        self.send_raw(format!("{line}\n"));
    }

    /// Writes bytes as they are.
    pub fn send_raw(&self, bytes: impl Into<Vec<u8>>) {
        let bytes = bytes.into();
        self.shared.lock().note("→", &bytes);
        let input = self.input.as_ref().expect("stdin was not closed before");
        // An ended host takes nothing; what was expected of it fails where it is waited for.
        let _ = input.send(bytes);
    }

    /// Bytes that the host's pipe has taken so far.
    #[must_use]
    pub fn bytes_sent(&self) -> u64 {
        self.shared.lock().bytes_sent
    }

    /// Closes stdin after what was sent.
    pub fn close_stdin(&mut self) {
        self.shared.lock().note("→", b"(stdin closed)");
        self.input = None;
    }

    /// Stops reading stdout, after what the pipe and one buffer hold.
    pub fn stop_reading(&self) {
        self.shared.change(|state| {
            state.reading_stopped = true;
            state.may_tear = true;
        });
    }

    /// Reads stdout again.
    pub fn read_on(&self) {
        self.shared.change(|state| state.reading_stopped = false);
    }

    /// Closes the reading end of stdout. The answer to one more frame wakes the reader for it.
    pub fn close_output(&self) {
        self.shared.change(|state| state.closing_output = true);
        self.send(&crate::probe("wakes the reader"));
        let deadline = Instant::now() + DEADLINE;
        self.wait_while(deadline, "the reader to end", |state| !state.output_ended);
    }

    /// Waits until every thread of the host waits for something: each sleeps, and none was
    /// scheduled for some looks in a row. What can go on without the test has then gone on.
    pub fn wait_quiet(&self) {
        const LOOKS: usize = 10;
        let deadline = Instant::now() + DEADLINE;
        let mut before = None;
        let mut equal = 0;
        while equal < LOOKS {
            assert!(Instant::now() < deadline, "the host does not come to rest");
            thread::sleep(Duration::from_millis(10));
            let now = self.switches_when_asleep();
            equal = if now.is_some() && now == before {
                equal + 1
            } else {
                0
            };
            before = now;
        }
    }

    /// How often threads of the host were switched, summed up; `None` while one of them runs.
    fn switches_when_asleep(&self) -> Option<u64> {
        let tasks = format!("/proc/{}/task", self.pid().as_raw_nonzero());
        let mut switches = 0;
        for task in std::fs::read_dir(tasks).expect("the host runs") {
            let status = task.expect("a thread").path().join("status");
            // A thread may end meanwhile.
            let status = std::fs::read_to_string(status).ok()?;
            for line in status.lines() {
                if line.starts_with("State:") && !line.contains("(sleeping)") {
                    return None;
                }
                if let Some((name, count)) = line.split_once(':')
                    && name.ends_with("voluntary_ctxt_switches")
                {
                    switches += count.trim().parse::<u64>().expect("a count");
                }
            }
        }
        Some(switches)
    }

    /// Sends a signal to the host.
    pub fn signal(&self, signal: Signal) {
        self.shared
            .lock()
            .note("→", format!("({signal:?})").as_bytes());
        // One that has ended is what some tests are about.
        let _ = pidfd_send_signal(self.host_fd(), signal);
    }

    /// Kills the shell that started the host.
    pub fn kill_shell(&mut self) {
        assert!(self.behind_shell.is_some(), "a shell started the host");
        self.shared.lock().note("→", b"(parent killed)");
        self.child.kill().expect("the shell is ours");
        self.child.wait().expect("the shell is ours");
        self.reaped = true;
    }

    /// The first frame, of all so far and to come, for which `look` finds something.
    ///
    /// # Panics
    /// After [`DEADLINE`], when the output ends before, or when a frame breaks a promise.
    pub fn find<T>(&self, what: &str, mut look: impl FnMut(&Arc<Frame>) -> Option<T>) -> T {
        let deadline = Instant::now() + DEADLINE;
        let mut seen = 0;
        loop {
            let state = self.shared.lock();
            let new = state.frames.get(seen..).unwrap_or_default().to_vec();
            let (ended, faults) = (state.output_ended, state.faults.clone());
            drop(state);
            assert!(faults.is_empty(), "{faults:#?}");
            seen += new.len();
            if let Some(found) = new.iter().find_map(&mut look) {
                return found;
            }
            assert!(!ended, "the output ended; still waiting for {what}");
            self.wait_while(deadline, what, |state| {
                state.frames.len() == seen && !state.output_ended && state.faults.is_empty()
            });
        }
    }

    fn wait_while(&self, deadline: Instant, what: &str, not_yet: impl Fn(&State) -> bool) {
        let left = deadline.saturating_duration_since(Instant::now());
        let (state, wait) = self
            .shared
            .changed
            .wait_timeout_while(self.shared.lock(), left, |state| not_yet(state))
            .expect("no thread of the harness panics while it holds the state");
        // The report of a failed test takes the lock too.
        drop(state);
        assert!(!wait.timed_out(), "waited in vain for {what}");
    }

    /// The first frame, of all so far and to come, that `is` it.
    pub fn wait_for(&self, what: &str, is: impl Fn(&Frame) -> bool) -> Arc<Frame> {
        self.find(what, |frame| is(frame).then(|| Arc::clone(frame)))
    }

    /// The answer to the frame with this id: for a turn its terminal frame.
    pub fn answer(&self, request_id: &str) -> Arc<Frame> {
        self.wait_for(&format!("the answer to {request_id}"), |frame| {
            frame.answers(request_id) && !matches!(frame.kind(), "turn.accepted" | "turn.started")
        })
    }

    /// Sends a frame and waits for its answer.
    pub fn ask(&self, frame: &Value) -> Arc<Frame> {
        self.send(frame);
        let id = frame["request_id"].as_str().expect("asked with an id");
        self.answer(id)
    }

    /// Waits until a worker has taken the turn.
    pub fn wait_started(&self, request_id: &str) -> Arc<Frame> {
        self.wait_for(&format!("turn.started of {request_id}"), |frame| {
            frame.kind() == "turn.started" && frame.answers(request_id)
        })
    }

    /// Waits for the first event of this type in a session.
    pub fn wait_event(&self, sid: &str, kind: &str) -> Arc<Frame> {
        self.wait_for(&format!("event {kind} of {sid}"), |frame| {
            frame.sid() == Some(sid) && frame.event() == Some(kind)
        })
    }

    /// Every frame so far.
    ///
    /// # Panics
    /// One of them broke a promise.
    #[must_use]
    pub fn frames(&self) -> Vec<Arc<Frame>> {
        let state = self.shared.lock();
        let (frames, faults) = (state.frames.clone(), state.faults.clone());
        drop(state);
        assert!(faults.is_empty(), "{faults:#?}");
        frames
    }

    /// Every frame so far of a session.
    #[must_use]
    pub fn frames_of(&self, sid: &str) -> Vec<Arc<Frame>> {
        let mut frames = self.frames();
        frames.retain(|frame| frame.sid() == Some(sid));
        frames
    }

    /// Every frame so far with this id.
    #[must_use]
    pub fn frames_with_id(&self, request_id: &str) -> Vec<Arc<Frame>> {
        let mut frames = self.frames();
        frames.retain(|frame| frame.answers(request_id));
        frames
    }

    /// What a session's frames so far are, in order: event types, else frame types.
    #[must_use]
    pub fn story(&self, sid: &str) -> Vec<String> {
        self.frames_of(sid)
            .iter()
            .map(|frame| frame.event().unwrap_or(frame.kind()).to_owned())
            .collect()
    }

    /// What it wrote to stderr so far.
    #[must_use]
    pub fn stderr(&self) -> String {
        String::from_utf8_lossy(&self.shared.lock().stderr).into_owned()
    }

    /// Waits until stderr holds `text`.
    pub fn wait_stderr(&self, text: &str) {
        let deadline = Instant::now() + DEADLINE;
        self.wait_while(deadline, &format!("{text:?} on stderr"), |state| {
            !String::from_utf8_lossy(&state.stderr).contains(text)
        });
    }

    /// Its log file so far; empty where there is none.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.home.join("logs/turnhost.log")).unwrap_or_default()
    }

    /// The sessions that its log says were finalized, each with its `end_reason`, sorted.
    #[must_use]
    pub fn finalized(&self) -> Vec<(String, String)> {
        let mut sessions: Vec<_> = self
            .log()
            .lines()
            .filter(|line| line.contains("session finalized"))
            .map(|line| (log_field(line, "sid"), log_field(line, "end_reason")))
            .collect();
        sessions.sort();
        sessions
    }

    /// Waits for the end of the host, and for the last of its output.
    ///
    /// # Panics
    /// It still runs after [`DEADLINE`].
    pub fn wait_end(&mut self) {
        assert!(wait_exit(self.host_fd(), DEADLINE), "the host still runs");
        let deadline = Instant::now() + DEADLINE;
        self.wait_while(deadline, "the end of its output", |state| {
            !(state.log_ended && (state.output_ended || state.reading_stopped))
        });
    }

    /// Waits for the end of the host; its exit code, or the signal that ended it.
    pub fn exit(&mut self) -> Exit {
        assert!(self.behind_shell.is_none(), "only a child has a status");
        self.wait_end();
        let status = self.child.wait().expect("the host is our child");
        self.reaped = true;
        Exit::of(status)
    }

    /// Whether it runs.
    #[must_use]
    pub fn is_running(&self) -> bool {
        !wait_exit(self.host_fd(), Duration::ZERO)
    }

    /// Most memory it ever had in RAM, in MiB.
    #[must_use]
    pub fn peak_mib(&self) -> f64 {
        self.status_kib("VmHWM:") / 1024.0
    }

    /// Memory it has in RAM, in MiB.
    #[must_use]
    pub fn resident_mib(&self) -> f64 {
        self.status_kib("VmRSS:") / 1024.0
    }

    fn status_kib(&self, name: &str) -> f64 {
        let path = format!("/proc/{}/status", self.pid().as_raw_nonzero());
        let status = std::fs::read_to_string(path).expect("the host runs");
        status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .and_then(|rest| rest.trim().strip_suffix(" kB"))
            .and_then(|number| number.trim().parse().ok())
            .expect("/proc tells memory in kB")
    }

    fn host_fd(&self) -> &OwnedFd {
        self.behind_shell.as_ref().unwrap_or(&self.child_fd)
    }

    fn report(&self) -> String {
        let mut report = String::from("--- frames in (→) and out (←)\n");
        let state = self.shared.lock();
        for line in &state.transcript {
            let _ = writeln!(report, "{line}");
        }
        for fault in &state.faults {
            let _ = writeln!(report, "--- broken promise: {fault}");
        }
        let stderr = String::from_utf8_lossy(&state.stderr).into_owned();
        drop(state);
        let _ = writeln!(report, "--- stderr\n{}", tail(&stderr));
        let _ = writeln!(report, "--- log\n{}", tail(&self.log()));
        report
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("{}", self.report());
        }
        // A stopped or deaf host as well: nothing of it may stay.
        let _ = pidfd_send_signal(self.host_fd(), Signal::KILL);
        if self.behind_shell.is_some() {
            wait_exit(self.host_fd(), DEADLINE);
        }
        if !self.reaped {
            // The whole group, while its number is still ours.
            let _ = rustix::process::kill_process_group(self.child_pid(), Signal::KILL);
        }
        let _ = self.child.wait();
        self.input = None;
        self.read_on();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() && !thread::panicking() {
                panic!("a thread of the harness panicked");
            }
        }
        let faults = &self.shared.lock().faults;
        if !thread::panicking() {
            assert!(faults.is_empty(), "{faults:#?}");
        }
    }
}

/// How a host ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// By itself.
    Code(i32),
    /// By a signal.
    Signal(i32),
}

impl Exit {
    fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => unreachable!("a process ends by itself or by a signal"),
        }
    }
}

/// Waits until the process has ended; false when it has not.
fn wait_exit(process: &OwnedFd, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).expect("a deadline fits into a timespec");
        let mut fds = [PollFd::new(process, PollFlags::IN)];
        match poll(&mut fds, Some(&left)) {
            Ok(ready) => return ready > 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("poll of a pidfd: {error}"),
        }
    }
}

fn pid_of(value: &Value) -> Pid {
    value
        .as_i64()
        .and_then(|pid| i32::try_from(pid).ok())
        .and_then(Pid::from_raw)
        .expect("a pid")
}

fn log_field(line: &str, name: &str) -> String {
    let value = line
        .split_once(&format!(" {name}="))
        .map(|(_, rest)| rest.split([' ', ',']).next().unwrap_or_default())
        .unwrap_or_default();
    value.trim_matches('"').to_owned()
}

fn tail(text: &str) -> &str {
    let start = text.len().saturating_sub(8 * 1024);
    text.get(start..).unwrap_or(text)
}

fn start_thread(
    name: &str,
    shared: &Arc<Shared>,
    run: impl FnOnce(&Shared) + Send + 'static,
) -> JoinHandle<()> {
    let shared = Arc::clone(shared);
    thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || run(&shared))
        .expect("a thread can be started")
}

fn write_input(shared: &Shared, mut stdin: ChildStdin, lines: &Receiver<Vec<u8>>) {
    for bytes in lines {
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            match stdin.write(rest) {
                Ok(count) => {
                    rest = &rest[count..];
                    shared.change(|state| state.bytes_sent += count as u64);
                }
                // The host is gone; its exit says why.
                Err(_) => return,
            }
        }
    }
}

fn read_output(shared: &Shared, stdout: ChildStdout, max_frame_bytes: usize) {
    let mut stdout = BufReader::with_capacity(64 * 1024, stdout);
    loop {
        let mut state = shared.lock();
        while state.reading_stopped {
            state = shared
                .changed
                .wait(state)
                .expect("no thread of the harness panics while it holds the state");
        }
        drop(state);
        let mut line = Vec::new();
        let count = stdout.read_until(b'\n', &mut line).unwrap_or_default();
        if count == 0 || shared.lock().closing_output {
            // Before anybody hears of it: then the host cannot write to it any more.
            drop(stdout);
            return shared.change(|state| state.output_ended = true);
        }
        shared.change(|state| {
            state.note("←", &line);
            if let Err(fault) = state.take(line, max_frame_bytes) {
                let frame = state.transcript.back().cloned().unwrap_or_default();
                state.faults.push(format!("{fault}: {frame}"));
            }
        });
    }
}

impl State {
    fn take(&mut self, mut line: Vec<u8>, max_frame_bytes: usize) -> Result<(), String> {
        if line.pop_if(|last| *last == b'\n').is_none() {
            return if self.may_tear {
                Ok(())
            } else {
                Err("a line ends".into())
            };
        }
        if line.len() > max_frame_bytes {
            return Err(format!("a line has at most {max_frame_bytes} bytes"));
        }
        let line = String::from_utf8(line).map_err(|_| "a line is UTF-8")?;
        let frame = Frame::parse(line)?;
        let order = self.order.check(&frame);
        self.frames.push(Arc::new(frame));
        order
    }
}

fn read_log(shared: &Shared, mut stderr: impl Read) {
    let mut buffer = [0; 4096];
    loop {
        match stderr.read(&mut buffer) {
            Ok(0) | Err(_) => return shared.change(|state| state.log_ended = true),
            Ok(count) => shared.change(|state| state.stderr.extend_from_slice(&buffer[..count])),
        }
    }
}
