//! Stands between a gateway and a host, relays their bytes and writes down what went by.
//!
//! Invariant: the relay never waits for the file. What the writer of the file cannot take at once
//! is lost to the recording, which then says so at its end.
//! Invariant: bytes are handed on as they come, whatever they are.
//!
//! | thread | does |
//! | --- | --- |
//! | the caller's | host to gateway; sees the end of the host |
//! | `record-in` | gateway to host; ends when either side does |
//! | `record-signal` | forwards signals to the host |
//! | `record-file` | owns the file |

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::value::RawValue;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use turnhost_protocol::limits::MAX_MAX_FRAME_BYTES;

use super::fixture::Exit;
use super::lines::Lines;
use super::transcript::Transcript;

/// Bytes that are relayed at once.
const CHUNK_BYTES: usize = 64 * 1024;

/// Chunks that may wait for the file: 64 MiB.
const WAITING_CHUNKS: usize = 1024;

/// Variables that change what a host does, and so belong into the recording: SPEC §14.
const RECORDED_ENVIRONMENT: [&str; 4] = [
    "TURNHOST_WORKERS",
    "HERMES_TUI_RPC_POOL_WORKERS",
    "TURNHOST_HEARTBEAT_SECS",
    "HERMES_COMPUTE_HOST_HEARTBEAT_SECS",
];

/// A recording that could not begin, or is not whole.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file cannot be written; nothing was started.
    #[error("cannot write the recording {}: {source}", file.display())]
    File {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The script that the host is to play cannot be read; nothing was started.
    #[error("cannot read the script {}: {source}", script.display())]
    Script {
        /// The file.
        script: PathBuf,
        /// What is wrong with it.
        source: io::Error,
    },
    /// An argument of the host is not UTF-8; nothing was started.
    #[error("cannot record the argument {0:?}: it is not UTF-8")]
    Argument(OsString),
    /// The host did not start.
    #[error("cannot start the host {}: {source}", program.to_string_lossy())]
    Start {
        /// What was to be started.
        program: OsString,
        /// What the system said.
        source: io::Error,
    },
    /// The relay itself failed.
    #[error("cannot relay between gateway and host: {0}")]
    Relay(#[from] io::Error),
}

/// A relay that has ended.
#[derive(Debug)]
pub struct Recorded {
    /// The host's exit code; 128 and the signal's number where one has ended it.
    pub exit_code: u8,
    /// Why the recording is not whole, if it is not.
    pub lost: Option<String>,
}

/// Starts `argv`, relays between it and the own stdin and stdout until it ends, and writes what
/// went by to `file` as a fixture.
///
/// `home` is given to the host as `TURNHOST_HOME`. SIGTERM, SIGINT and SIGHUP are forwarded.
///
/// # Errors
/// The recording could not begin, or the relay failed. A recording that is not whole is none.
pub fn record(
    file: &Path,
    argv: &[OsString],
    home: Option<&Path>,
) -> Result<Recorded, RecordError> {
    let (program, args) = argv
        .split_first()
        .ok_or(io::Error::from(io::ErrorKind::InvalidInput))?;
    let mut transcript = Transcript::default();
    begin(&mut transcript, args)?;
    let written_to = File::create(file).map_err(|source| RecordError::File {
        file: file.to_owned(),
        source,
    })?;
    // Before the host is there, so that no signal is missed.
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;

    let mut host = Host::start(program, args, home)?;
    let (tape, taps) = Tape::new();
    let writer = spawn("record-file", move || {
        write_file(&taps, transcript, written_to)
    })?;
    let signal_end = signals.handle();
    let (target, signal_tape) = (host.process.try_clone()?, tape.clone());
    let forwarder = spawn("record-signal", move || {
        for number in signals.forever() {
            if let Some(signal) = Signal::from_named_raw(number) {
                signal_tape.note(Tap::Signal(number));
                // An error means that the host has just ended.
                let _ = pidfd_send_signal(&target, signal);
            }
        }
    })?;
    let (stopped, stop) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(io::Error::from)?;
    let reader = host.child.stdin.take().map(|to_host| {
        let tape = tape.clone();
        spawn("record-in", move || {
            relay_in(to_host.into(), &stopped, &tape)
        })
    });
    let reader = reader.transpose()?;

    let relayed = host.relay_out(&tape, stop);
    // The relay has dropped `stop`, so the reader ends; only then is nothing more sent.
    join(reader);
    let exit = host.end();
    tape.note(Tap::Exited(exit));
    signal_end.close();
    join(Some(forwarder));
    let overflowed = tape.is_full();
    // The writer ends when the last sender is gone.
    drop(tape);
    let written = writer
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("its writer has failed")));
    relayed?;
    let lost = match written {
        Err(error) => Some(format!("cannot write {}: {error}", file.display())),
        Ok(()) if overflowed => Some(format!("{} was too slow to be written", file.display())),
        Ok(()) => None,
    };
    let exit_code = match exit {
        Exit::Code(code) => u8::try_from(code).unwrap_or(u8::MAX),
        Exit::Signal(number) => u8::try_from(128 + number).unwrap_or(u8::MAX),
    };
    Ok(Recorded { exit_code, lost })
}

/// Writes down how the host is started: without a home, as each play has its own, and with the
/// script itself instead of its name.
fn begin(transcript: &mut Transcript, args: &[OsString]) -> Result<(), RecordError> {
    let mut kept = Vec::new();
    let mut script = None;
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        let arg = arg
            .to_str()
            .ok_or_else(|| RecordError::Argument(arg.clone()))?;
        let (flag, joined) = match arg.split_once('=') {
            Some((flag, value)) => (flag, Some(OsStr::new(value))),
            None => (arg, None),
        };
        match flag {
            "--home" | "--script" => {
                let value = joined.or_else(|| args.next().map(OsString::as_os_str));
                if let Some(path) = value.map(PathBuf::from).filter(|_| flag == "--script") {
                    script = Some(read_script(path)?);
                }
            }
            _ => kept.push(arg.to_owned()),
        }
    }
    let env = RECORDED_ENVIRONMENT
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), std::env::var(name).ok()?)));
    transcript.host(&kept, &env.collect::<BTreeMap<_, _>>(), script.as_deref());
    Ok(())
}

fn read_script(script: PathBuf) -> Result<Box<RawValue>, RecordError> {
    let read = fs::read_to_string(&script);
    let parsed = read.and_then(|text| Ok(serde_json::from_str::<Box<RawValue>>(&text)?));
    parsed
        .map(|script| turnhost_protocol::json::on_one_line(&script))
        .map_err(|source| RecordError::Script { script, source })
}

/// Something that went by.
#[derive(Debug)]
enum Tap {
    Sent(Vec<u8>),
    Received(Vec<u8>),
    Closed,
    Signal(i32),
    Exited(Exit),
}

/// The way to the file, which never makes a relay wait.
#[derive(Clone)]
struct Tape {
    sender: Sender<Tap>,
    full: Arc<AtomicBool>,
}

impl Tape {
    fn new() -> (Self, Receiver<Tap>) {
        let (sender, receiver) = bounded(WAITING_CHUNKS);
        (
            Self {
                sender,
                full: Arc::default(),
            },
            receiver,
        )
    }

    /// Hands `tap` to the file, or gives the recording up.
    fn note(&self, tap: Tap) {
        if !self.is_full()
            && let Err(TrySendError::Full(_)) = self.sender.try_send(tap)
        {
            self.full.store(true, Ordering::Relaxed);
        }
    }

    fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed)
    }
}

/// Writes the transcript until nobody taps any more.
fn write_file(taps: &Receiver<Tap>, mut transcript: Transcript, file: File) -> io::Result<()> {
    let mut file = BufWriter::new(file);
    let (mut sent, mut received) = (Lines::default(), Lines::default());
    let mut written = Ok(());
    for tap in taps {
        if written.is_err() {
            // The rest is only taken, so that nobody meets a full channel.
            continue;
        }
        match tap {
            Tap::Sent(bytes) => {
                sent.push(&bytes);
                while let Some(line) = sent.next_line() {
                    transcript.sent(&line, true);
                }
            }
            Tap::Received(bytes) => {
                received.push(&bytes);
                while let Some(line) = received.next_line() {
                    transcript.received(&line);
                }
            }
            Tap::Closed => {
                if !sent.rest().is_empty() {
                    transcript.sent(sent.rest(), false);
                }
                transcript.closed();
            }
            Tap::Signal(number) => transcript.signal(number),
            Tap::Exited(exit) => transcript.exited(exit),
        }
        let longest = sent.rest().len().max(received.rest().len());
        written = if longest > MAX_MAX_FRAME_BYTES {
            Err(io::Error::other(format!(
                "a line of more than {MAX_MAX_FRAME_BYTES} bytes"
            )))
        } else {
            write_lines(&mut file, transcript.take_lines(), taps.is_empty())
        };
    }
    written
}

fn write_lines(file: &mut BufWriter<File>, lines: Vec<String>, flush: bool) -> io::Result<()> {
    for line in lines {
        file.write_all(line.as_bytes())?;
        file.write_all(b"\n")?;
    }
    if flush { file.flush() } else { Ok(()) }
}

/// The host, which is gone when this is.
struct Host {
    child: Child,
    process: OwnedFd,
    ended: bool,
}

impl Host {
    fn start(program: &OsStr, args: &[OsString], home: Option<&Path>) -> Result<Self, RecordError> {
        let mut command = Command::new(program);
        // A group of its own: an interrupt of the terminal reaches the host once, forwarded.
        command
            .args(args)
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if let Some(home) = home {
            command.env("TURNHOST_HOME", home);
        }
        let failed = |source| RecordError::Start {
            program: program.to_owned(),
            source,
        };
        let mut child = command.spawn().map_err(failed)?;
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(process) => Ok(Self {
                child,
                process,
                ended: false,
            }),
            Err(error) => {
                end(&mut child);
                Err(failed(error.into()))
            }
        }
    }

    /// Relays the host's output until it has ended, then drops `stop`.
    fn relay_out(&mut self, tape: &Tape, stop: OwnedFd) -> io::Result<()> {
        let mut stop = Some(stop);
        let mut from_host = self.child.stdout.take();
        if let Some(pipe) = &from_host {
            rustix::io::ioctl_fionbio(pipe, true)?;
        }
        let mut buffer = vec![0; CHUNK_BYTES];
        loop {
            let mut watched = vec![PollFd::new(&self.process, PollFlags::IN)];
            watched.extend(
                from_host
                    .as_ref()
                    .map(|pipe| PollFd::new(pipe, PollFlags::IN)),
            );
            wait(&mut watched)?;
            // What the host wrote before it ended is in the pipe when its end is seen.
            let ended = !watched[0].revents().is_empty();
            drop(watched);
            while let Some(pipe) = &mut from_host {
                match pipe.read(&mut buffer) {
                    Ok(0) => from_host = None,
                    Ok(read) => {
                        tape.note(Tap::Received(buffer[..read].to_owned()));
                        if stop.is_some() && write_all(io::stdout(), &buffer[..read]).is_err() {
                            // The gateway is gone. The host shall see that, and may still finish.
                            stop = None;
                            tape.note(Tap::Closed);
                        }
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            if ended {
                return Ok(());
            }
        }
    }

    /// Ends the host where it has not ended by itself.
    fn end(&mut self) -> Exit {
        self.ended = true;
        end(&mut self.child)
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if !self.ended {
            self.end();
        }
    }
}

fn end(child: &mut Child) -> Exit {
    // Killing what has ended does nothing.
    let _ = child.kill();
    match child.wait() {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => Exit::Code(code),
            (None, number) => Exit::Signal(number.unwrap_or_default()),
        },
        Err(_) => Exit::Signal(Signal::KILL.as_raw()),
    }
}

/// Relays the own input to the host until one of them ends, or `stopped` hangs up.
fn relay_in(to_host: OwnedFd, stopped: &OwnedFd, tape: &Tape) {
    if rustix::io::ioctl_fionbio(&to_host, true).is_err() {
        return;
    }
    let from_gateway = io::stdin();
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let mut watched = [
            PollFd::new(stopped, PollFlags::IN),
            PollFd::new(&from_gateway, PollFlags::IN),
        ];
        if wait(&mut watched).is_err() || !watched[0].revents().is_empty() {
            return;
        }
        match rustix::io::read(&from_gateway, &mut buffer) {
            Ok(0) | Err(Errno::IO) => {
                tape.note(Tap::Closed);
                return;
            }
            Ok(read) => {
                // First noted, then sent: no answer is noted before its question.
                tape.note(Tap::Sent(buffer[..read].to_owned()));
                if !write_to_host(&to_host, &buffer[..read], stopped) {
                    return;
                }
            }
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(_) => return,
        }
    }
}

/// Writes all of `bytes`; false when the host reads no more or `stopped` hangs up.
fn write_to_host(to_host: &OwnedFd, mut bytes: &[u8], stopped: &OwnedFd) -> bool {
    while !bytes.is_empty() {
        match rustix::io::write(to_host, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                let mut watched = [
                    PollFd::new(stopped, PollFlags::IN),
                    PollFd::new(to_host, PollFlags::OUT),
                ];
                if wait(&mut watched).is_err() || !watched[0].revents().is_empty() {
                    return false;
                }
            }
            Err(_) => return false,
        }
    }
    true
}

/// Writes all of `bytes` past any buffer.
fn write_all(to: impl AsFd, mut bytes: &[u8]) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(&to, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => wait(&mut [PollFd::new(&to, PollFlags::OUT)])?,
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits until something of `watched` happens. No deadline: a relay waits as long as its ends do.
fn wait(watched: &mut [PollFd<'_>]) -> rustix::io::Result<()> {
    loop {
        match poll(watched, None) {
            Err(Errno::INTR) => {}
            done => return done.map(drop),
        }
    }
}

fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    thread::Builder::new().name(name.to_owned()).spawn(work)
}

fn join(thread: Option<JoinHandle<()>>) {
    if let Some(thread) = thread {
        // A panic was printed by its thread; the other threads have done their part.
        let _ = thread.join();
    }
}
