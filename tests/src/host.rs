//! A real host at the other end of two pipes.

use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;
use tempfile::TempDir;
use turnhost_protocol::limits;

use crate::binary;
use crate::frame::Frame;
use crate::options::Options;
use crate::pipes::{self, Check, Shared};

/// After this long a wait has failed. It is far beyond what a loaded machine needs.
pub const DEADLINE: Duration = Duration::from_secs(30);

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
        if let Some(cwd) = &options.cwd {
            command.current_dir(cwd);
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
        let check = Check {
            max_frame_bytes: options.max_frame_bytes.unwrap_or(limits::MAX_FRAME_BYTES),
            forgets_deltas: options.forgets_deltas,
        };
        let (shared, input, threads) = pipes::start(&mut child, check);
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

    /// Closes stdin at once: what its pipe has not taken is lost.
    pub fn hang_up(&mut self) {
        self.shared.change(|state| {
            state.note("→", b"(hung up)");
            state.hung_up = true;
        });
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
        self.shared
            .wait_while(deadline, "the reader to end", |state| !state.output_ended);
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
            self.shared.wait_while(deadline, what, |state| {
                state.frames.len() == seen && !state.output_ended && state.faults.is_empty()
            });
        }
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
        self.shared
            .wait_while(deadline, &format!("{text:?} on stderr"), |state| {
                !String::from_utf8_lossy(&state.stderr).contains(text)
            });
    }

    /// Its log file so far; empty where there is none.
    #[must_use]
    pub fn log(&self) -> String {
        let path = self.home.join("logs/turnhost.log");
        // Reading a pipe or a device might never end.
        if !std::fs::metadata(&path).is_ok_and(|facts| facts.is_file()) {
            return String::new();
        }
        std::fs::read_to_string(path).unwrap_or_default()
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
        self.shared
            .wait_while(deadline, "the end of its output", |state| {
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
        self.hang_up();
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
    pub(crate) fn of(status: ExitStatus) -> Self {
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Code(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => unreachable!("a process ends by itself or by a signal"),
        }
    }
}

/// Waits until the process has ended; false when it has not.
pub(crate) fn wait_exit(process: &OwnedFd, limit: Duration) -> bool {
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
