//! Walks through a fixture, line by line, against one host.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use tempfile::TempDir;
use turnhost_protocol::json::quoted;
use turnhost_protocol::limits::MAX_QUOTED_BYTES;

use super::child::{HostProcess, Launch, Next};
use super::fixture::{Exit, Fixture, Line, Piece, Verb, signal_name};
use super::inbox::{Inbox, Nearest, Taken};
use super::report::{Failure, Report};

/// Lines each way that a failure shows.
const LAST_LINES: usize = 6;

/// What all fixtures of one run share.
#[derive(Debug)]
pub struct Options {
    /// The program to start: a path, or a name that is looked up in `PATH`.
    pub host: PathBuf,
    /// The supervisor that stands in between; `None` plays against the host alone. A fixture whose
    /// host loses its parent is always played so.
    pub supervisor: Option<PathBuf>,
    /// The home for the host; `None` for a fresh one that is removed afterwards.
    pub home: Option<PathBuf>,
}

/// A fixture that could not be played at all.
#[derive(Debug, thiserror::Error)]
pub enum PlayError {
    /// The host did not start.
    #[error("cannot start the host {}: {source}; name another one with --host", program.display())]
    Start {
        /// What was to be started.
        program: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The home of the host could not be made.
    #[error("cannot make a home for the host in {}: {source}", place.display())]
    Home {
        /// Where it was to be.
        place: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Plays `fixture` against a host of its own, which has ended when this returns.
///
/// For a fixture with `parent_dies` the calling process becomes a child subreaper and stays one.
///
/// # Errors
/// There was no host to play against. That the host differs is no error but a [`Report`].
pub fn play(fixture: &Fixture, options: &Options) -> Result<Report, PlayError> {
    let begun = Instant::now();
    let place = Place::make(fixture, options)?;
    let host_args = place.args(fixture);
    let supervisor = options
        .supervisor
        .as_ref()
        .filter(|_| !fixture.has_mortal_parent());
    let (program, args) = match supervisor {
        None => (&options.host, host_args),
        Some(supervisor) => (supervisor, place.supervised(&options.host, host_args)),
    };
    let launch = Launch {
        program: program.as_os_str(),
        args,
        env: &fixture.host.env,
        mortal_parent: fixture.has_mortal_parent(),
    };
    let host = HostProcess::start(launch).map_err(|source| PlayError::Start {
        program: program.clone(),
        source,
    })?;
    // Dropped before its home: the host is gone when that is removed.
    let mut player = Player {
        host,
        inbox: Inbox::default(),
        sent: VecDeque::new(),
        received: VecDeque::new(),
        sent_lines: 0,
        differs: None,
        mortal_parent: fixture.has_mortal_parent(),
    };
    let failure = fixture
        .lines
        .iter()
        .find_map(|line| player.line(line).err())
        .map(|boxed| *boxed);
    Ok(Report {
        name: fixture.name(),
        path: fixture.path.clone(),
        turns: player.inbox.turns(),
        sent: player.sent_lines,
        received: player.inbox.received(),
        elapsed: begun.elapsed(),
        failure,
    })
}

/// Where the host lives, and its script.
struct Place {
    home: PathBuf,
    script: Option<PathBuf>,
    /// Removes what was made.
    _made: TempDir,
}

impl Place {
    fn make(fixture: &Fixture, options: &Options) -> Result<Self, PlayError> {
        let failed = |source| PlayError::Home {
            place: std::env::temp_dir(),
            source,
        };
        let made = tempfile::Builder::new()
            .prefix("turnhost-replay-")
            .tempdir()
            .map_err(failed)?;
        let home = options
            .home
            .clone()
            .unwrap_or_else(|| made.path().join("home"));
        if options.home.is_none() {
            fs::create_dir(&home).map_err(failed)?;
            fs::set_permissions(&home, Permissions::from_mode(0o700)).map_err(failed)?;
        }
        let script = match &fixture.host.script {
            Some(script) => {
                let path = made.path().join("script.json");
                fs::write(&path, script.get()).map_err(failed)?;
                Some(path)
            }
            None => None,
        };
        Ok(Self {
            home,
            script,
            _made: made,
        })
    }

    /// The fixture's arguments, then what is not among them.
    fn args(&self, fixture: &Fixture) -> Vec<OsString> {
        let mut args: Vec<OsString> = fixture.host.args.iter().map(Into::into).collect();
        let mut add = |flag: &str, path: &Path| {
            let given = |arg: &String| arg == flag || arg.starts_with(&format!("{flag}="));
            if !fixture.host.args.iter().any(given) {
                args.extend([OsStr::new(flag).to_owned(), path.into()]);
            }
        };
        add("--home", &self.home);
        if let Some(script) = &self.script {
            add("--script", script);
        }
        args
    }

    /// The arguments of a supervisor before the host.
    fn supervised(&self, host: &Path, host_args: Vec<OsString>) -> Vec<OsString> {
        let home_of = |pair: &[OsString]| (pair[0] == "--home").then(|| pair[1].clone());
        let home = host_args.windows(2).find_map(home_of);
        let home = home.unwrap_or_else(|| self.home.clone().into());
        let before = [
            "run".into(),
            "--home".into(),
            home,
            "--".into(),
            host.into(),
        ];
        before.into_iter().chain(host_args).collect()
    }
}

/// Why the play stops, before it is known at which line.
struct Stop {
    what: String,
    nearest: Option<Nearest>,
}

impl Stop {
    fn because(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            nearest: None,
        }
    }
}

struct Player {
    host: HostProcess,
    inbox: Inbox,
    /// The last lines each way, cut where they are long.
    sent: VecDeque<String>,
    received: VecDeque<String>,
    sent_lines: u64,
    /// The `differs` that stands right above.
    differs: Option<String>,
    /// The host is behind a parent that can die, and signals have to find it.
    mortal_parent: bool,
}

impl Player {
    fn line(&mut self, line: &Line) -> Result<(), Box<Failure>> {
        if let Verb::Differs(why) = &line.verb {
            self.differs = Some(why.clone());
            return Ok(());
        }
        let result = self.verb(line);
        let differs = self.differs.take();
        result.map_err(|stop| {
            let (got, mismatches) = match stop.nearest {
                Some(Nearest { frame, mismatches }) => (Some(frame), mismatches),
                None => (None, Vec::new()),
            };
            Box::new(Failure {
                line: line.number,
                fixture_line: line.text.clone(),
                what: stop.what,
                differs,
                got: got.map(|frame| quoted(&frame, MAX_QUOTED_BYTES)),
                mismatches,
                last_sent: self.sent.drain(..).collect(),
                last_received: self.received.drain(..).collect(),
                stderr: self.host.stderr_tail(),
            })
        })
    }

    fn verb(&mut self, line: &Line) -> Result<(), Stop> {
        let deadline = Instant::now() + line.within;
        match &line.verb {
            Verb::In(pieces) => self.send(pieces, deadline),
            Verb::Out(expected) => {
                let take = |inbox: &mut Inbox| match inbox.take(expected) {
                    Taken::Never(_) if expected.optional => Taken::Yes,
                    taken => taken,
                };
                self.wait(line, deadline, take).map_err(|stop| {
                    let nearest = stop.nearest.or_else(|| self.inbox.nearest(expected));
                    Stop { nearest, ..stop }
                })
            }
            Verb::Deltas(deltas) => {
                let mut left = deltas.text.clone();
                self.wait(line, deadline, |inbox| inbox.take_deltas(deltas, &mut left))
            }
            Verb::Signal(signal) => {
                self.name_host()?;
                let sent = self.host.signal(*signal);
                sent.map_err(|error| Stop::because(format!("cannot send the signal: {error}")))
            }
            Verb::CloseStdin => {
                self.host.close_stdin();
                Ok(())
            }
            Verb::ParentDies => {
                self.name_host()?;
                let killed = self.host.kill_parent();
                killed.map_err(|error| Stop::because(format!("cannot end the parent: {error}")))
            }
            Verb::Pause(pause) => {
                // The host is heard meanwhile; what it writes is for later lines.
                let deadline = Instant::now() + *pause;
                while let Heard::Frame = self.hear(deadline)? {}
                std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
                Ok(())
            }
            Verb::Exit(expected) => self.expect_exit(*expected, deadline),
            Verb::Cut | Verb::Differs(_) => Ok(()),
        }
    }
    fn send(&mut self, pieces: &[Piece], deadline: Instant) -> Result<(), Stop> {
        let mut bytes = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Bytes(text) => bytes.extend_from_slice(text),
                Piece::Repeat(text, count) => bytes.extend(text.as_bytes().repeat(*count)),
                Piece::Id(name) => {
                    let value = self.inbox.id(name);
                    // As it stands inside a JSON string.
                    let quoted = super::json::quote(value.unwrap_or_default());
                    bytes.extend_from_slice(quoted.trim_matches('"').as_bytes());
                }
            }
        }
        remember(&mut self.sent, &bytes);
        self.sent_lines += 1;
        match self.host.write(&bytes, deadline) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Stop::because("the host did not read this line in time")),
            Err(error) => Err(Stop::because(format!("cannot write to the host: {error}"))),
        }
    }

    /// Takes in frames until `take` has what it wants.
    fn wait(
        &mut self,
        line: &Line,
        deadline: Instant,
        mut take: impl FnMut(&mut Inbox) -> Taken,
    ) -> Result<(), Stop> {
        loop {
            match take(&mut self.inbox) {
                Taken::Yes => return Ok(()),
                Taken::Never(nearest) => {
                    return Err(Stop {
                        what: "another frame came in its place".to_owned(),
                        nearest: Some(nearest),
                    });
                }
                Taken::NotYet => {}
            }
            match self.hear(deadline)? {
                Heard::Frame => {}
                Heard::Ended(exit) => {
                    let how = exit_text(exit);
                    return Err(Stop::because(format!(
                        "the host ended before this came: {how}"
                    )));
                }
                Heard::Nothing => {
                    let waited = line.within.as_secs_f64();
                    return Err(Stop::because(format!(
                        "nothing that fits came within {waited} s"
                    )));
                }
            }
        }
    }

    /// Takes in the next line of the host.
    fn hear(&mut self, deadline: Instant) -> Result<Heard, Stop> {
        let next = self.host.next_line(deadline);
        match next.map_err(|error| Stop::because(format!("cannot read from the host: {error}")))? {
            Next::Late => Ok(Heard::Nothing),
            Next::Ended(exit) => Ok(Heard::Ended(exit)),
            Next::Line(line) => {
                remember(&mut self.received, &line);
                match self.inbox.receive(&line) {
                    Ok(()) => Ok(Heard::Frame),
                    Err(problem) => {
                        let mismatches = Vec::new();
                        let frame = String::from_utf8_lossy(&line).into_owned();
                        Err(Stop {
                            what: format!("the host wrote a bad line: {problem}"),
                            nearest: Some(Nearest { frame, mismatches }),
                        })
                    }
                }
            }
        }
    }

    fn expect_exit(&mut self, expected: Exit, deadline: Instant) -> Result<(), Stop> {
        let exit = loop {
            match self.hear(deadline)? {
                Heard::Frame => {}
                Heard::Ended(exit) => break exit,
                Heard::Nothing => return Err(Stop::because("the host has not ended in time")),
            }
        };
        if exit != expected {
            let (expected, got) = (exit_text(expected), exit_text(exit));
            return Err(Stop::because(format!(
                "the host ended with {got}, not with {expected}"
            )));
        }
        let mut left = self.inbox.leftovers();
        if left.is_empty() {
            return Ok(());
        }
        let what = format!(
            "frames came that no line expects: {}; the first one",
            left.len()
        );
        let nearest = Nearest {
            frame: left.swap_remove(0),
            mismatches: Vec::new(),
        };
        Err(Stop {
            what,
            nearest: Some(nearest),
        })
    }

    /// Makes signals reach a host behind a mortal parent.
    fn name_host(&mut self) -> Result<(), Stop> {
        if !self.mortal_parent {
            return Ok(());
        }
        let pid = self.inbox.host_pid();
        let pid = pid.ok_or_else(|| Stop::because("no hello has named the host's process yet"))?;
        let adopted = self.host.adopt(pid);
        adopted.map_err(|error| Stop::because(format!("cannot find the host: {error}")))
    }
}

/// What a wait for the host has brought.
enum Heard {
    Frame,
    Ended(Exit),
    Nothing,
}

fn exit_text(exit: Exit) -> String {
    match exit {
        Exit::Code(code) => format!("exit code {code}"),
        Exit::Signal(number) => match signal_name(number) {
            Some(name) => format!("signal {name}"),
            None => format!("signal {number}"),
        },
    }
}

fn remember(lines: &mut VecDeque<String>, line: &[u8]) {
    let head = &line[..line.len().min(2 * MAX_QUOTED_BYTES)];
    let text = String::from_utf8_lossy(head);
    lines.push_back(quoted(text.trim_end_matches('\n'), MAX_QUOTED_BYTES));
    if lines.len() > LAST_LINES {
        lines.pop_front();
    }
}
