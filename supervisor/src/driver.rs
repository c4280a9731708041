//! The one loop around the core: it waits in one place, hands over what happened, and does what
//! the core decides.
//!
//! It runs on the thread that spawns the hosts and lives as long as the supervisor. Invariant:
//! nothing in it waits for a pipe: it reads what is there and writes what is taken. Invariant: what
//! an action brings about is handed to the core before the next thing that happens.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::ioctl_fionread;
use turnhost_protocol::limits::{KEPT_BYTES, RELAY_BYTES};
use turnhost_protocol::line::{Line, LineReader};
use turnhost_protocol::process::monotonic_ns;

use crate::child::{HostCommand, HostProcess, reap_strangers};
use crate::core::{
    Action, Core, CoreStatus, EndCode, Event, HostLook, Level, Nanos, Rules, from_ms,
};
use crate::registry::Registry;
use crate::transport::{FdSink, FdSource, Sink, Source};

/// Reads of the gateway's input before a signal is obeyed: 64 KiB each, more than a pipe holds.
const MAX_LAST_READS: usize = 64;

/// How long the gateway may take to read what it was told at the end.
const FLUSH_MS: u64 = 2_000;

/// What a loop is made of.
pub(crate) struct Parts<S, K> {
    pub(crate) rules: Rules,
    pub(crate) command: HostCommand,
    pub(crate) registry: Registry,
    /// From the gateway.
    pub(crate) input: S,
    /// To the gateway.
    pub(crate) output: K,
    /// Readable when somebody asked this process to end.
    pub(crate) terminated: Option<OwnedFd>,
    /// Readable when a child ended; where there is none, only the host is reaped.
    pub(crate) child_ended: Option<OwnedFd>,
}

/// A host and the ends of its pipes.
struct Host {
    process: HostProcess,
    /// `None` once it was closed on purpose, or broke.
    input: Option<FdSink>,
    /// The input is closed once it is written.
    close_input: bool,
    /// Bytes that were written to an input that is closed.
    written: u64,
    output: Option<LineReader<FdSource>>,
    /// Its exit was handed over; it is a zombie now.
    ended: bool,
}

/// Told how things are whenever something happened.
pub(crate) type OnStep = Box<dyn FnMut(CoreStatus, Option<i32>) + Send>;

/// The loop.
pub(crate) struct Driver<S, K> {
    core: Core,
    max_frame_bytes: usize,
    command: HostCommand,
    registry: Registry,
    input: Option<LineReader<S>>,
    output: K,
    /// The gateway reads no more.
    output_broken: bool,
    terminated: Option<OwnedFd>,
    child_ended: Option<OwnedFd>,
    host: Option<Host>,
    /// Kept between steps for its memory.
    actions: Vec<Action>,
    notice: Vec<u8>,
    /// Everything is over; until then the gateway may read what it was told.
    end: Option<(EndCode, Nanos)>,
    on_step: OnStep,
}

/// What was found ready. Sinks are not in it: all that wait are tried each time.
#[derive(Clone, Copy, Default)]
struct Ready {
    input: bool,
    host_output: bool,
    host_input_broken: bool,
    host_ended: bool,
    terminated: bool,
    child_ended: bool,
    /// The host's output was among what was looked at.
    host_output_polled: bool,
}

impl<S: Source, K: Sink> Driver<S, K> {
    pub(crate) fn new(parts: Parts<S, K>, on_step: OnStep) -> Self {
        let max_frame_bytes = parts.rules.max_frame_bytes;
        Self {
            core: Core::new(parts.rules),
            max_frame_bytes,
            command: parts.command,
            registry: parts.registry,
            input: Some(LineReader::new(parts.input, max_frame_bytes)),
            output: parts.output,
            output_broken: false,
            terminated: parts.terminated,
            child_ended: parts.child_ended,
            host: None,
            actions: Vec::new(),
            notice: Vec::new(),
            end: None,
            on_step,
        }
    }

    /// Runs until everything is over.
    pub(crate) fn run(mut self) -> EndCode {
        loop {
            let now = monotonic_ns();
            let deadline = match self.end {
                Some((_, flush_until)) => Some(flush_until),
                // Each life of a host may add to what the gateway has to read: while that is too
                // much, no new one begins.
                None if self.holds_respawn() => None,
                None => self.core.deadline(),
            };
            let ready = self.poll(deadline.map(|at| at.saturating_sub(now)));
            self.serve(ready);
            if self.end.is_none() && deadline.is_some_and(|at| at <= monotonic_ns()) {
                let look = self.host.as_ref().map(|host| HostLook {
                    silent: ready.host_output_polled && !ready.host_output,
                    cpu_ticks: host.process.cpu_ticks(),
                });
                self.handle(Event::Time(look), &[]);
            }
            self.flush();
            let pid = self.host.as_ref().map(|host| host.process.pid());
            (self.on_step)(self.core.status(), pid);
            if let Some((code, flush_until)) = self.end
                && (self.output_broken
                    || self.output.waiting() == 0
                    || flush_until <= monotonic_ns())
            {
                return code;
            }
        }
    }

    fn serve(&mut self, ready: Ready) {
        if ready.terminated {
            clear(self.terminated.as_ref());
            // What was written before the signal is owed its answers: where no host runs, the
            // signal is the end.
            self.read_gateway_to_its_end();
            self.handle(Event::Terminate, &[]);
        }
        if ready.host_output {
            self.read_host();
        }
        // After a signal what was found ready is read already; a further read would wait.
        if ready.input && !ready.terminated {
            self.read_gateway();
        }
        if ready.host_ended {
            self.host_ended();
        }
        if ready.host_input_broken {
            self.close_host_input();
            self.handle(Event::HostPipeClosed, &[]);
        }
        if ready.child_ended {
            clear(self.child_ended.as_ref());
            reap_strangers(self.host.as_ref().map(|host| host.process.pid()));
        }
    }

    /// Whether a host that ended has to wait for the gateway before it is started again.
    fn holds_respawn(&self) -> bool {
        self.host.is_none()
            && !self.output_broken
            && self.output.waiting() >= RELAY_BYTES
            && !self.core.is_ending()
    }

    /// Whether the gateway takes enough for the host to be read: `for_gateway` bytes wait for it.
    fn reads_host(&self, for_gateway: usize) -> bool {
        self.output_broken || for_gateway < RELAY_BYTES || self.core.waits_for_hello()
    }

    /// Whether there is room for more of the gateway's frames.
    fn reads_gateway(&self, for_gateway: usize) -> bool {
        let for_host = self.host.as_ref().and_then(|host| host.input.as_ref());
        for_host.is_none_or(|sink| sink.waiting() < KEPT_BYTES)
            && (self.output_broken || for_gateway < KEPT_BYTES)
    }

    /// Waits for something, at most for `wait`.
    fn poll(&self, wait: Option<Nanos>) -> Ready {
        // Asked once: another thread may empty the queue at any moment, and what is polled must
        // not be decided from two answers. Else neither the queue nor the host wakes this thread.
        let for_gateway = self.output.waiting();
        let mut polled: Vec<PollFd<'_>> = Vec::with_capacity(7);
        let mut add = |fd, flags| {
            polled.push(PollFd::from_borrowed_fd(fd, flags));
            polled.len() - 1
        };
        let open_input = self.input.as_ref().filter(|_| self.end.is_none());
        let input = open_input.map(|input| {
            // Without room only the gateway's end is waited for; then what is left is read after all.
            let (fd, flags) = if self.reads_gateway(for_gateway) {
                (input.source().fd(), PollFlags::IN)
            } else {
                input.source().hangup()
            };
            add(fd, flags)
        });
        let mut host_output = None;
        let mut host_ended = None;
        let mut host_input_broken = None;
        if let Some(host) = self.host.as_ref().filter(|host| !host.ended) {
            host_ended = Some(add(host.process.pidfd(), PollFlags::IN));
            let output = host
                .output
                .as_ref()
                .filter(|_| self.reads_host(for_gateway));
            host_output = output.map(|output| add(output.source().fd(), PollFlags::IN));
            if let Some(sink) = &host.input {
                // Without anything to write it still shows when the host closes its end.
                let (fd, flags) = sink.wait_for();
                let idle = sink.waiting() == 0;
                let index = add(fd, if idle { PollFlags::empty() } else { flags });
                host_input_broken = Some(index).filter(|_| idle);
            }
        }
        if for_gateway > 0 && !self.output_broken {
            let (fd, flags) = self.output.wait_for();
            add(fd, flags);
        }
        let terminated = self.terminated.as_ref().filter(|_| self.end.is_none());
        let terminated = terminated.map(|fd| add(fd.as_fd(), PollFlags::IN));
        let child_ended = self.child_ended.as_ref();
        let child_ended = child_ended.map(|fd| add(fd.as_fd(), PollFlags::IN));
        let wait =
            wait.map(|wait| Timespec::try_from(Duration::from_nanos(wait)).unwrap_or_default());
        if poll(&mut polled, wait.as_ref()).is_err() {
            // Interrupted by a signal, whose pipe is readable the next time.
            return Ready::default();
        }
        let is_ready =
            |index: Option<usize>| index.is_some_and(|index| !polled[index].revents().is_empty());
        Ready {
            input: is_ready(input),
            host_output: is_ready(host_output),
            host_input_broken: is_ready(host_input_broken),
            host_ended: is_ready(host_ended),
            terminated: is_ready(terminated),
            child_ended: is_ready(child_ended),
            host_output_polled: host_output.is_some(),
        }
    }

    /// Reads once from the gateway, and handles each line that is whole.
    fn read_gateway(&mut self) {
        let Some(mut reader) = self.input.take() else {
            return;
        };
        reader.source_mut().set_ready();
        while self.end.is_none() {
            match reader.next_line() {
                Ok(Some(Line::Whole(line) | Line::Cut(line))) => {
                    self.handle(Event::GatewayLine(line), line);
                }
                Ok(Some(Line::TooLong { head, bytes })) => {
                    self.handle(Event::GatewayLineTooLong { head, bytes }, &[]);
                }
                Ok(None) => return self.handle(Event::GatewayClosed, &[]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    tracing::error!("cannot read from the gateway: {error}");
                    return self.handle(Event::GatewayClosed, &[]);
                }
            }
        }
        self.input = Some(reader);
    }

    /// Reads what the gateway wrote so far, a bounded amount of it.
    fn read_gateway_to_its_end(&mut self) {
        for _ in 0..MAX_LAST_READS {
            let is_readable = self.input.as_ref().is_some_and(|reader| {
                let mut polled = [PollFd::from_borrowed_fd(
                    reader.source().fd(),
                    PollFlags::IN,
                )];
                let now = Timespec::default();
                matches!(poll(&mut polled, Some(&now)), Ok(ready) if ready > 0)
            });
            if !is_readable || !self.reads_gateway(self.output.waiting()) {
                return;
            }
            self.read_gateway();
        }
    }

    /// Reads once from the host, and handles each line that is whole.
    fn read_host(&mut self) {
        let Some(mut reader) = self.host.as_mut().and_then(|host| host.output.take()) else {
            return;
        };
        reader.source_mut().set_ready();
        loop {
            match reader.next_line() {
                Ok(Some(Line::Whole(line))) => self.handle(Event::HostLine(line), line),
                Ok(Some(Line::TooLong { head, bytes })) => {
                    self.handle(Event::HostLineTooLong { head, bytes }, &[]);
                }
                // The rest of a line that nobody will finish.
                Ok(Some(Line::Cut(_))) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Ok(None) => return self.handle(Event::HostPipeClosed, &[]),
                Err(error) => {
                    tracing::error!("cannot read from the host: {error}");
                    return self.handle(Event::HostPipeClosed, &[]);
                }
            }
        }
        if let Some(host) = &mut self.host {
            host.output = Some(reader);
        }
    }

    /// The host's process ended: reads what it left in the pipe, but waits for no more. Others may
    /// hold the other end, so there may never be an end of file.
    fn host_ended(&mut self) {
        let Some(exit) = self.host.as_ref().and_then(|host| host.process.exit()) else {
            return;
        };
        let (left, read_before) = self.host_output_state();
        let mut read = 0;
        while read < left {
            self.read_host();
            match self.host_output_state() {
                (_, now_read) if now_read > read_before + read => read = now_read - read_before,
                _ => break,
            }
        }
        self.close_host_input();
        let Some(host) = &mut self.host else { return };
        host.output = None;
        host.ended = true;
        let written = host.written;
        self.handle(Event::HostExited { exit, written }, &[]);
    }

    /// Bytes that are in the pipe from the host, and that were read from it so far.
    fn host_output_state(&self) -> (u64, u64) {
        let output = self.host.as_ref().and_then(|host| host.output.as_ref());
        output.map_or((0, 0), |output| {
            let source = output.source();
            (
                ioctl_fionread(source.fd()).unwrap_or(0),
                source.bytes_read(),
            )
        })
    }

    /// One step of the core, and what follows from it. `line` is what a relay relays.
    fn handle(&mut self, event: Event<'_>, line: &[u8]) {
        let mut actions = std::mem::take(&mut self.actions);
        self.core.step(event, monotonic_ns(), &mut actions);
        for action in actions.drain(..) {
            self.act(action, line);
        }
        self.actions = actions;
    }

    fn act(&mut self, action: Action, line: &[u8]) {
        match action {
            Action::RelayToHost => self.send_to_host(line),
            Action::SendToHost(line) => self.send_to_host(&line),
            Action::CloseHostInput => {
                if let Some(host) = &mut self.host {
                    host.close_input = true;
                }
            }
            Action::RelayToGateway => {
                if !self.output_broken {
                    self.output.push(line);
                    self.output.push(b"\n");
                }
            }
            Action::Tell(notice) => {
                if !self.output_broken {
                    self.notice.clear();
                    notice.encode(self.max_frame_bytes, &mut self.notice);
                    self.output.push(&self.notice);
                }
            }
            Action::Spawn => match self.spawn() {
                Ok(()) => self.handle(Event::Spawned, &[]),
                Err(message) => self.handle(Event::SpawnFailed { message }, &[]),
            },
            Action::Register { boot_id, build_sha } => {
                let result = self.register(&boot_id, &build_sha);
                self.handle(Event::Registered(result), &[]);
            }
            Action::SignalHost(signal) => {
                if let Some(host) = &self.host {
                    host.process.signal(signal);
                }
            }
            Action::SignalSession(signal) => {
                let host = self.host.as_ref();
                let left = host.map_or(0, |host| host.process.signal_session(signal));
                self.handle(Event::SessionLeft(left), &[]);
            }
            Action::CountSession => {
                let host = self.host.as_ref();
                let left = host.map_or(0, |host| host.process.count_session());
                self.handle(Event::SessionLeft(left), &[]);
            }
            Action::Reap => {
                self.registry.remove_own();
                if let Some(host) = self.host.take() {
                    host.process.reap();
                }
            }
            Action::Log(level, text) => match level {
                Level::Info => tracing::info!("{text}"),
                Level::Warning => tracing::warn!("{text}"),
                Level::Error => tracing::error!("{text}"),
            },
            Action::End(code) => self.end = Some((code, monotonic_ns() + from_ms(FLUSH_MS))),
        }
    }

    fn send_to_host(&mut self, line: &[u8]) {
        if let Some(sink) = self.host.as_mut().and_then(|host| host.input.as_mut()) {
            sink.push(line);
            sink.push(b"\n");
        }
    }

    fn spawn(&mut self) -> Result<(), String> {
        let mut process = self.command.spawn().map_err(|error| error.to_string())?;
        // Registered at once, so that a host whose supervisor dies now is found again.
        if let Err(message) = self.write_record(&process, "", "") {
            process.destroy();
            return Err(message);
        }
        let Some((input, output)) = process.take_pipes() else {
            process.destroy();
            return Err("the host has no pipes".to_owned());
        };
        tracing::info!("started a host with pid {}", process.pid());
        self.host = Some(Host {
            process,
            input: Some(FdSink::new(input)),
            close_input: false,
            written: 0,
            output: Some(LineReader::new(FdSource::new(output), self.max_frame_bytes)),
            ended: false,
        });
        Ok(())
    }

    /// Writes the record again, now that the host is what it will be: a wrapper may have started
    /// it in its own place.
    fn register(&self, boot_id: &str, build_sha: &str) -> Result<(), String> {
        match &self.host {
            Some(host) => self.write_record(&host.process, boot_id, build_sha),
            None => Ok(()),
        }
    }

    fn write_record(
        &self,
        process: &HostProcess,
        boot_id: &str,
        build_sha: &str,
    ) -> Result<(), String> {
        let identity = process.identity().map_err(|error| {
            format!(
                "cannot read who the host with pid {} is: {error}",
                process.pid()
            )
        })?;
        // One that ended already needs no record; its exit is noticed next.
        let Some(identity) = identity else {
            return Ok(());
        };
        self.registry
            .write(&identity, self.command.argv(), boot_id, build_sha)
            .map_err(|error| format!("cannot register the host: {error}"))
    }

    /// Writes what both sides take now.
    fn flush(&mut self) {
        if self.output.waiting() > 0
            && !self.output_broken
            && let Err(error) = self.output.flush()
        {
            // Nobody is left to tell anything: the same as the end of input.
            tracing::warn!("the gateway reads no more: {error}");
            self.output_broken = true;
            self.input = None;
            if self.end.is_none() {
                self.handle(Event::GatewayClosed, &[]);
            }
        }
        let Some(host) = &mut self.host else { return };
        let Some(sink) = &mut host.input else { return };
        let broken = sink.flush().is_err();
        let done = host.close_input && sink.waiting() == 0;
        if broken || done {
            self.close_host_input();
        }
        if broken {
            self.handle(Event::HostPipeClosed, &[]);
        }
    }

    fn close_host_input(&mut self) {
        if let Some(host) = &mut self.host
            && let Some(sink) = host.input.take()
        {
            host.written = sink.written();
        }
    }
}

/// Empties a pipe that only says that something happened.
fn clear(fd: Option<&OwnedFd>) {
    if let Some(fd) = fd {
        // What is left shows again at the next poll.
        let _ = rustix::io::read(fd, &mut [0_u8; 64][..]);
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::os::fd::BorrowedFd;
    use std::time::Instant;

    use rustix::event::{EventfdFlags, eventfd};
    use turnhost_protocol::home::Home;

    use super::*;
    use crate::core::RespawnRules;
    use crate::transport::{MemorySource, memory_to_poller};

    /// A queue that another thread empties right after it was asked how full it is.
    struct Emptied {
        waiting: Cell<usize>,
        event: OwnedFd,
    }

    impl Sink for Emptied {
        fn push(&mut self, _: &[u8]) {}

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }

        fn waiting(&self) -> usize {
            self.waiting.take()
        }

        fn wait_for(&self) -> (BorrowedFd<'_>, PollFlags) {
            (self.event.as_fd(), PollFlags::IN)
        }
    }

    fn driver<K: Sink>(folder: &std::path::Path, output: K) -> Driver<MemorySource, K> {
        let home = Home::find(Some(folder.to_owned()), |_| None).unwrap();
        // The writing end is closed at once, and nobody polls it here.
        let (_, input) = memory_to_poller(0).unwrap();
        let parts = Parts {
            rules: Rules {
                max_frame_bytes: 1_000,
                homes: Vec::new(),
                build_sha: String::new(),
                heartbeat: 0,
                respawn: RespawnRules::default(),
                hello_wait: from_ms(10_000),
            },
            command: HostCommand::new(vec!["cat".into()], std::env::vars_os().collect()),
            registry: Registry::lock(&home, None).unwrap(),
            input,
            output,
            terminated: None,
            child_ended: None,
        };
        Driver::new(parts, Box::new(|_, _| {}))
    }

    #[test]
    fn a_queue_that_is_emptied_meanwhile_wakes_the_loop() {
        let folder = tempfile::tempdir().unwrap();
        let output = Emptied {
            waiting: Cell::new(RELAY_BYTES),
            event: eventfd(1, EventfdFlags::empty()).unwrap(),
        };
        let mut driver = driver(folder.path(), output);
        driver.input = None;
        driver.spawn().unwrap();
        let began = Instant::now();
        let ready = driver.poll(Some(from_ms(20_000)));
        assert!(began.elapsed() < Duration::from_secs(10), "it slept");
        assert!(!ready.host_output_polled);
        driver.act(Action::SignalHost(crate::core::Signal::Kill), &[]);
        driver.act(Action::Reap, &[]);
    }
}
