//! A supervised host as a part of another program.
//!
//! [`HostSupervisor`] is a gateway that speaks frames in memory to the same loop that `run` drives.
//! Four parties: the callers' threads push whole lines and wait with deadlines; `turnhost-loop`
//! owns the host and is the thread that spawns it; `turnhost-dispatch` tells answers from the rest
//! and never runs foreign code; `turnhost-callbacks` runs it. Foreign code may call this value, and
//! may drop it: answers do not wait for callbacks.
//!
//! Invariant: no caller ever waits for a pipe, and no lock is held while foreign code runs.
//! Invariant: each completion is called exactly once, whatever happens to host and supervisor.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use turnhost_protocol::limits;
use turnhost_protocol::look::{look, text};
use turnhost_protocol::process::{monotonic_ns, random_hex32};
use turnhost_protocol::route::{RouteClass, class_of};

use crate::core::{CoreStatus, EndCode, Kind};
use crate::driver::{Driver, Parts};
use crate::jobs::{Job, Jobs};
use crate::late::LateAnswers;
use crate::relay::{Prepared, Settings, StartError};
use crate::transport::{
    MemoryReader, MemoryWriter, PushError, memory_from_poller, memory_to_poller,
};

/// How long the end of a thread is waited for, beyond what it may take by itself.
const JOIN_WAIT: Duration = Duration::from_secs(20);

/// A frame from the host, or from its supervisor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFrame {
    kind: String,
    line: String,
}

impl HostFrame {
    /// Its `type`.
    #[must_use]
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The line itself, untouched.
    #[must_use]
    pub fn line(&self) -> &str {
        &self.line
    }

    /// The frame as a value; null where a number in it has no place in one.
    #[must_use]
    pub fn value(&self) -> Value {
        serde_json::from_str(&self.line).unwrap_or_default()
    }
}

/// Why a frame was not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Too much waits for the host already.
    #[error("the host does not take what waits for it; try again later")]
    Full,
    /// There is no supervisor any more.
    #[error("the supervisor has ended; start another one")]
    Ended,
    /// The frame is longer than a line may be.
    #[error("the frame has {bytes} bytes, more than the limit of {max}")]
    TooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// Another frame with this id waits for its answer.
    #[error("a frame with this request_id is waiting for its answer; give each its own")]
    DuplicateId,
}

/// Why a question has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// It was not sent.
    #[error(transparent)]
    Send(#[from] SendError),
    /// No answer came in time; a control's late one goes to its callback.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// The supervisor ended before the answer.
    #[error("the supervisor ended before the answer")]
    Ended,
    /// No mutator route has this name.
    #[error("unclassified route: {0}")]
    UnclassifiedRoute(String),
    /// The route has a frame of its own.
    #[error("{0} is no control; use submit_turn or interrupt")]
    TurnPath(String),
}

/// How a supervisor and its host are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SupervisorStatus {
    /// What the core says.
    pub core: CoreStatus,
    /// The process of the host, while there is one.
    pub host_pid: Option<i32>,
}

/// What a caller wants to be told of once.
pub(crate) type Callback = Box<dyn FnOnce(HostFrame) + Send>;
type Sink = Box<dyn FnMut(HostFrame) + Send>;

/// Who waits for an answer.
enum Waiter {
    Turn { sid: String, then: Callback },
    Call(Sender<HostFrame>),
}

#[derive(Default)]
struct Waiters {
    open: HashMap<String, Waiter>,
    late: LateAnswers<Callback>,
    /// No answer will come any more.
    ended: bool,
}

struct Shared {
    waiters: Mutex<Waiters>,
    status: Mutex<Option<SupervisorStatus>>,
    jobs: Jobs,
}

/// Ends the jobs also when the thread that hands them over panics.
struct JobsEnd(Arc<Shared>);

impl Drop for JobsEnd {
    fn drop(&mut self) {
        self.0.jobs.end();
    }
}

/// One supervised host. Dropping it drains the host as the end of its input does.
pub struct HostSupervisor {
    shared: Arc<Shared>,
    input: MemoryWriter,
    max_frame_bytes: usize,
    ended: Receiver<EndCode>,
    callbacks_ended: Receiver<()>,
    threads: Vec<JoinHandle<()>>,
}

impl HostSupervisor {
    /// Locks the home, ends an orphan of an earlier supervisor, starts a host and waits for its
    /// hello. `sink` gets every frame that answers no call of this value: events, heartbeats, and
    /// what the supervisor tells of its host.
    ///
    /// # Errors
    /// The home is supervised already or cannot be used, or the first host did not start.
    pub fn start(
        settings: Settings,
        sink: impl FnMut(HostFrame) + Send + 'static,
    ) -> Result<Self, StartError> {
        let prepared = Prepared::new(settings)?;
        let max_frame_bytes = prepared.rules.max_frame_bytes;
        let pipes = StartError::system("make a pipe in memory");
        let (input, source) = memory_to_poller(limits::KEPT_BYTES).map_err(pipes)?;
        let pipes = StartError::system("make a pipe in memory");
        let (output, reader) = memory_from_poller().map_err(pipes)?;
        let parts = Parts {
            rules: prepared.rules,
            command: prepared.command,
            registry: prepared.registry,
            input: source,
            output,
            terminated: None,
            child_ended: None,
        };
        let shared = Arc::new(Shared {
            waiters: Mutex::default(),
            status: Mutex::default(),
            jobs: Jobs::default(),
        });
        let (started, first) = bounded(1);
        let (end, ended) = bounded(1);
        let (callbacks_end, callbacks_ended) = bounded::<()>(1);
        let (loop_end, loop_ended) = bounded(1);
        let (status, callbacks) = (Arc::clone(&shared), Arc::clone(&shared));
        let dispatcher = Dispatcher {
            shared: Arc::clone(&shared),
            started: Some(started),
            loop_ended,
        };
        // Each thread ends when the one before it does: the loop at the end of its input, dispatch
        // at the end of the loop's output, callbacks after the last job of dispatch.
        let threads = vec![
            spawn("turnhost-callbacks", move || {
                run_callbacks(&callbacks.jobs, Box::new(sink));
                drop(callbacks_end);
            })?,
            spawn("turnhost-dispatch", move || dispatcher.run(&reader))?,
            spawn("turnhost-loop", move || {
                let on_step = move |core, host_pid| {
                    *status.status.lock() = Some(SupervisorStatus { core, host_pid });
                };
                let code = Driver::new(parts, Box::new(on_step)).run();
                // Nobody may be left to be told.
                let _ = loop_end.send(());
                let _ = end.send(code);
            })?,
        ];
        let supervisor = Self {
            shared,
            input,
            max_frame_bytes,
            ended,
            callbacks_ended,
            threads,
        };
        let wait = Duration::from_millis(limits::HELLO_WAIT_MS + limits::TERMINATE_WAIT_MS);
        match first.recv_timeout(wait + JOIN_WAIT) {
            Ok(Ok(())) => Ok(supervisor),
            Ok(Err(message)) => Err(StartError::FirstHost(message)),
            Err(_) => Err(StartError::FirstHost("it says nothing".to_owned())),
        }
    }

    /// Submits a turn: the fields of a `turn.start`, of which `sid` is needed and `type` is set
    /// here. `then` gets its terminal frame, once. Answers the `request_id`, made where the fields
    /// have none.
    ///
    /// # Errors
    /// It was not sent. `then` was called with a `turn.error` whose reason is `send_failed`.
    pub fn submit_turn(
        &self,
        mut fields: Map<String, Value>,
        then: impl FnOnce(HostFrame) + Send + 'static,
    ) -> Result<String, SendError> {
        let id = fields.get("request_id").filter(|id| !id.is_null()).cloned();
        let id = id.unwrap_or_else(|| random_hex32().into());
        let sid = fields
            .get("sid")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        fields.insert("type".to_owned(), "turn.start".into());
        fields.insert("request_id".to_owned(), id.clone());
        let waiter = Waiter::Turn {
            sid: sid.clone(),
            then: Box::new(then),
        };
        let shown = id.as_str().map_or_else(|| id.to_string(), str::to_owned);
        self.send(&Value::Object(fields), waiter)
            .map(|()| shown)
            .map_err(|(error, waiter)| {
                if let Waiter::Turn { then, .. } = waiter {
                    let frame = json!({
                        "type": "turn.error", "sid": sid, "request_id": id,
                        "message": error.to_string(), "reason": "send_failed",
                        "execution_state": "not_started",
                    });
                    call(then, frame_of(frame.to_string().as_bytes()));
                }
                error
            })
    }

    /// Interrupts the turn of a session.
    ///
    /// # Errors
    /// No answer came within `wait`.
    pub fn interrupt(&self, sid: &str, wait: Duration) -> Result<HostFrame, CallError> {
        self.call(json!({"type": "interrupt", "sid": sid}), wait, None)
    }

    /// Hands over what a person answered: the `params` of a `respond`.
    ///
    /// # Errors
    /// No answer came within `wait`.
    pub fn respond(
        &self,
        sid: &str,
        params: &Value,
        wait: Duration,
    ) -> Result<HostFrame, CallError> {
        self.call(
            json!({"type": "respond", "sid": sid, "params": params}),
            wait,
            None,
        )
    }

    /// Runs a mutator route with its further `fields`. An answer that comes after `wait` goes to
    /// `late`: once, for half an hour, for the last 64 controls.
    ///
    /// # Errors
    /// The route is no control, or no answer came within `wait`.
    pub fn control(
        &self,
        sid: &str,
        route_name: &str,
        mut fields: Map<String, Value>,
        wait: Duration,
        late: Option<Box<dyn FnOnce(HostFrame) + Send>>,
    ) -> Result<HostFrame, CallError> {
        match class_of(route_name) {
            None => return Err(CallError::UnclassifiedRoute(route_name.to_owned())),
            Some(RouteClass::TurnPath) => return Err(CallError::TurnPath(route_name.to_owned())),
            Some(RouteClass::RunConcurrent | RouteClass::IdleGated) => {}
        }
        fields.insert("type".to_owned(), "control".into());
        fields.insert("sid".to_owned(), sid.into());
        fields.insert("route_name".to_owned(), route_name.into());
        self.call(Value::Object(fields), wait, late)
    }

    /// Asks anything that has one answer: a frame of SPEC §3.
    ///
    /// # Errors
    /// No answer came within `wait`.
    pub fn ask(&self, frame: Map<String, Value>, wait: Duration) -> Result<HostFrame, CallError> {
        self.call(Value::Object(frame), wait, None)
    }

    /// Starts a host at once where none is started by itself any more.
    ///
    /// # Errors
    /// There is no supervisor any more.
    pub fn restart(&self) -> Result<(), SendError> {
        self.push(br#"{"type":"host.restart"}"#)
    }

    /// Whether a submitted turn has no terminal frame yet: of the session `sid`, or of any.
    #[must_use]
    pub fn has_pending_turn(&self, sid: Option<&str>) -> bool {
        let waiters = self.shared.waiters.lock();
        waiters.open.values().any(|waiter| match waiter {
            Waiter::Turn { sid: other, .. } => sid.is_none_or(|sid| sid == other),
            Waiter::Call(_) => false,
        })
    }

    /// How supervisor and host are; `None` before the first thing happened.
    #[must_use]
    pub fn status(&self) -> Option<SupervisorStatus> {
        *self.shared.status.lock()
    }

    /// Drains the host within `wait`, at most a minute, and ends.
    ///
    /// # Errors
    /// It did not end in time.
    pub fn shutdown(self, wait: Duration) -> Result<EndCode, CallError> {
        let wait = wait.min(Duration::from_millis(limits::MAX_SHUTDOWN_WAIT_MS));
        let wait_ms = u64::try_from(wait.as_millis()).unwrap_or(limits::MAX_SHUTDOWN_WAIT_MS);
        let frame = json!({"type": "shutdown", "request_id": random_hex32(), "wait_ms": wait_ms});
        if self.push(frame.to_string().as_bytes()).is_err() {
            // Without room for the frame the end of input has to do.
            self.input.close();
        }
        let excess = Duration::from_millis(limits::DRAIN_EXCESS_MS);
        match self.ended.recv_timeout(wait + excess + JOIN_WAIT) {
            Ok(code) => Ok(code),
            Err(RecvTimeoutError::Timeout) => Err(CallError::TimedOut(wait)),
            Err(RecvTimeoutError::Disconnected) => Err(CallError::Ended),
        }
    }

    fn call(
        &self,
        mut frame: Value,
        wait: Duration,
        late: Option<Callback>,
    ) -> Result<HostFrame, CallError> {
        let id = random_hex32();
        frame["request_id"] = id.as_str().into();
        let (sender, answer) = bounded(1);
        let _caller = self.shared.jobs.caller();
        self.send(&frame, Waiter::Call(sender))
            .map_err(|(error, _)| error)?;
        match answer.recv_timeout(wait) {
            Ok(frame) => Ok(frame),
            Err(RecvTimeoutError::Disconnected) => Err(CallError::Ended),
            Err(RecvTimeoutError::Timeout) => {
                let mut waiters = self.shared.waiters.lock();
                let key = key_of(&Value::from(id));
                // The answer may have come between the deadline and the lock.
                if waiters.open.remove(&key).is_none()
                    && let Ok(frame) = answer.try_recv()
                {
                    return Ok(frame);
                }
                if let Some(late) = late {
                    waiters.late.keep(key, late, monotonic_ns());
                }
                Err(CallError::TimedOut(wait))
            }
        }
    }

    /// Enters the waiter, then sends; takes it out again where that fails.
    fn send(&self, frame: &Value, waiter: Waiter) -> Result<(), (SendError, Waiter)> {
        let key = key_of(&frame["request_id"]);
        {
            let mut waiters = self.shared.waiters.lock();
            if waiters.ended {
                return Err((SendError::Ended, waiter));
            }
            if waiters.open.contains_key(&key) {
                return Err((SendError::DuplicateId, waiter));
            }
            waiters.open.insert(key.clone(), waiter);
        }
        self.push(frame.to_string().as_bytes()).or_else(|error| {
            // At the end of the supervisor dispatch may have answered it already.
            match self.shared.waiters.lock().open.remove(&key) {
                Some(waiter) => Err((error, waiter)),
                None => Ok(()),
            }
        })
    }

    fn push(&self, line: &[u8]) -> Result<(), SendError> {
        let (bytes, max) = (line.len(), self.max_frame_bytes);
        if bytes > max {
            return Err(SendError::TooLong { bytes, max });
        }
        self.input.push_line(line).map_err(|error| match error {
            PushError::Full => SendError::Full,
            PushError::Closed => SendError::Ended,
        })
    }
}

impl Drop for HostSupervisor {
    fn drop(&mut self) {
        self.input.close();
        let own = thread::current().id();
        if self
            .threads
            .iter()
            .any(|thread| thread.thread().id() == own)
        {
            // Foreign code drops it: the threads end after it, and none of them can be waited for
            // here. The loop's end frees the home and the host; it waits for nobody.
            let _ = self.ended.recv_timeout(JOIN_WAIT);
            return;
        }
        // The loop and dispatch end by themselves within the drain's budget; foreign code may not.
        let callbacks_end = self.callbacks_ended.recv_timeout(JOIN_WAIT);
        let all_end = callbacks_end != Err(RecvTimeoutError::Timeout);
        for thread in self.threads.drain(..) {
            if all_end || thread.is_finished() {
                // Its panic was logged where it happened.
                let _ = thread.join();
            } else {
                let name = thread.thread().name().unwrap_or_default().to_owned();
                tracing::error!("the thread {name} does not end; a callback may hold it up");
            }
        }
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StartError> {
    let builder = thread::Builder::new().name(name.to_owned());
    builder
        .spawn(run)
        .map_err(StartError::system("start a thread"))
}

/// Tells answers from the rest.
struct Dispatcher {
    shared: Arc<Shared>,
    /// Told of the first host, once.
    started: Option<Sender<Result<(), String>>>,
    /// Told when the loop has ended, unless it panicked.
    loop_ended: Receiver<()>,
}

impl Dispatcher {
    fn run(mut self, reader: &MemoryReader) {
        let _end = JobsEnd(Arc::clone(&self.shared));
        let mut taken = Vec::new();
        let mut rest: Vec<u8> = Vec::new();
        while reader.take(&mut taken) {
            rest.extend_from_slice(&taken);
            let whole = memchr::memrchr(b'\n', &rest).map_or(0, |at| at + 1);
            for line in rest[..whole].split(|byte| *byte == b'\n') {
                if !line.is_empty() {
                    self.dispatch(line);
                }
            }
            rest.drain(..whole);
        }
        let open = {
            let mut waiters = self.shared.waiters.lock();
            waiters.ended = true;
            std::mem::take(&mut waiters.open)
        };
        // What was sent after the loop had ended, unless it fell over what was sent before. Dropping
        // a call's sender tells its caller.
        let (message, reason, execution_state) = if self.loop_ended.recv().is_ok() {
            (SendError::Ended.to_string(), "send_failed", "not_started")
        } else {
            let message = "the supervisor failed; whether the turn ran is unknown".to_owned();
            (message, "crash", "unknown")
        };
        for (key, waiter) in open {
            if let Waiter::Turn { sid, then } = waiter {
                let id: Value = serde_json::from_str(&key).unwrap_or_default();
                let frame = json!({
                    "type": "turn.error", "sid": sid, "request_id": id,
                    "message": message, "reason": reason,
                    "execution_state": execution_state,
                });
                self.hand_over(Job::Callback(then, frame_of(frame.to_string().as_bytes())));
            }
        }
    }

    fn dispatch(&mut self, line: &[u8]) {
        let frame = frame_of(line);
        match frame.kind() {
            "hello" => self.tell_start(Ok(())),
            "host.gave_up" => {
                let message = frame.value()["message"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned();
                self.tell_start(Err(message));
            }
            _ => {}
        }
        let is_answer = Kind::is_answer(frame.kind());
        let id = look(line).request_id().filter(|_| is_answer);
        let key = id.map(|id| {
            serde_json::from_str(id.get())
                .map_or_else(|_| id.get().to_owned(), |value| key_of(&value))
        });
        let Some(key) = key else {
            return self.hand_over(Job::Sink(frame));
        };
        let mut waiters = self.shared.waiters.lock();
        let late = match waiters.open.remove(&key) {
            Some(Waiter::Call(caller)) => {
                // Still under the lock: a caller that gives up now looks once more.
                let _ = caller.try_send(frame);
                return;
            }
            Some(Waiter::Turn { then, .. }) => Some(then),
            None => waiters.late.take(&key, monotonic_ns()),
        };
        drop(waiters);
        self.hand_over(match late {
            Some(then) => Job::Callback(then, frame),
            None => Job::Sink(frame),
        });
    }

    fn tell_start(&mut self, result: Result<(), String>) {
        if let Some(started) = self.started.take() {
            // Whoever started it may have gone.
            let _ = started.send(result);
        }
    }

    fn hand_over(&self, job: Job) {
        self.shared.jobs.push(job);
    }
}

fn run_callbacks(jobs: &Jobs, mut sink: Sink) {
    while let Some(job) = jobs.next() {
        match job {
            Job::Callback(then, frame) => call(then, frame),
            Job::Sink(frame) => {
                if catch_unwind(AssertUnwindSafe(|| sink(frame))).is_err() {
                    tracing::error!("the sink of frames panicked; it goes on with the next frame");
                }
            }
        }
    }
}

/// Runs foreign code; its panic stops nothing.
fn call(then: Callback, frame: HostFrame) {
    if catch_unwind(AssertUnwindSafe(|| then(frame))).is_err() {
        tracing::error!("a callback panicked; its frame counts as delivered");
    }
}

pub(crate) fn frame_of(line: &[u8]) -> HostFrame {
    let kind = look(line).kind.and_then(text);
    HostFrame {
        kind: kind.unwrap_or_default().into_owned(),
        line: String::from_utf8_lossy(line).into_owned(),
    }
}

/// What tells two ids apart, however they are written.
fn key_of(id: &Value) -> String {
    id.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::Sink as _;

    /// What completes a turn that was sent, once the loop is gone.
    fn completion(loop_panicked: bool) -> Value {
        let shared = Arc::new(Shared {
            waiters: Mutex::default(),
            status: Mutex::default(),
            jobs: Jobs::default(),
        });
        let (sender, completed) = bounded(1);
        let turn = Waiter::Turn {
            sid: "s".to_owned(),
            then: Box::new(move |frame| sender.send(frame).unwrap()),
        };
        let key = key_of(&json!("t"));
        shared.waiters.lock().open.insert(key, turn);
        let (loop_end, loop_ended) = bounded(1);
        let dispatcher = Dispatcher {
            shared: Arc::clone(&shared),
            started: None,
            loop_ended,
        };
        let (mut output, reader) = memory_from_poller().unwrap();
        output.push(b"{\"type\":\"hb\"}\n");
        output.flush().unwrap();
        drop(output);
        if !loop_panicked {
            loop_end.send(()).unwrap();
        }
        drop(loop_end);
        dispatcher.run(&reader);
        run_callbacks(&shared.jobs, Box::new(|_| {}));
        completed.try_recv().unwrap().value()
    }

    #[test]
    fn a_turn_that_the_loop_fell_over_may_have_run() {
        let failed = completion(true);
        assert_eq!(
            (&failed["request_id"], &failed["execution_state"]),
            (&json!("t"), &json!("unknown"))
        );
        assert_eq!(completion(false)["execution_state"], "not_started");
    }
}
