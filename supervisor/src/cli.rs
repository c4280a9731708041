//! The commands, their flags and their exit codes.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;

use clap::{Args, Parser, Subcommand};
use turnhost_protocol::route::ROUTES;
use turnhost_supervisor::default_host;
use turnhost_supervisor::replay::{
    Fixture, FixtureError, Options, PlayError, RecordError, Report, play, record,
};

use crate::supervise::{self, SuperviseError};

/// A transcript differs, or a recording is not whole.
const EXIT_DIFFERS: u8 = 1;
/// The command line or a fixture is wrong.
const EXIT_USAGE: u8 = 2;
/// The host could not be started.
const EXIT_NO_HOST: u8 = 69;

/// Files that are played at once when nothing else is said: they mostly wait.
const MAX_JOBS: usize = 16;

/// Owns one turnhost: relays its frames, plays and records its transcripts.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// The home of the host
    #[arg(long, global = true, value_name = "DIR")]
    home: Option<PathBuf>,
    /// Print JSON
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(supervise::Run),
    Reap(supervise::Reap),
    Status(supervise::ShowStatus),
    Sessions(supervise::Sessions),
    /// Play transcripts against a host; exit 1 where one differs
    Replay(Replay),
    /// Relay between a gateway and a host, and write what goes by to FILE as a transcript
    Record(Record),
    /// Print the mutator routes with their classes
    Routes,
}

#[derive(Args)]
struct Replay {
    /// Against the host alone, without a supervisor in between
    #[arg(long)]
    bare: bool,
    /// The host [default: the turnhost beside this program, else in PATH]
    #[arg(long, value_name = "PATH")]
    host: Option<PathBuf>,
    /// Files that are played at once [default: all, at most 16; 1 with --home]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    jobs: Option<u16>,
    /// Transcripts, see fixtures/README.md
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

#[derive(Args)]
struct Record {
    /// The transcript to write
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The command line of the host
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "HOST ARGV"
    )]
    argv: Vec<OsString>,
}

/// Why a command has no result.
#[derive(Debug, thiserror::Error)]
enum CommandError {
    #[error(transparent)]
    Supervise(#[from] SuperviseError),
    #[error("cannot find this program itself: {0}; give --bare")]
    Own(io::Error),
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Fixtures(Vec<FixtureError>),
    #[error(transparent)]
    Play(#[from] PlayError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("{0}; the recording is not whole")]
    Lost(String),
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
    #[error("cannot write the result: {0}")]
    Output(#[from] io::Error),
}

impl CommandError {
    fn exit_code(&self) -> u8 {
        match self {
            Self::Supervise(error) => error.exit_code(),
            Self::Fixtures(_) => EXIT_USAGE,
            Self::Own(_) | Self::Play(_) | Self::Thread(_) => EXIT_NO_HOST,
            Self::Record(RecordError::Start { .. }) => EXIT_NO_HOST,
            Self::Record(RecordError::Relay(_)) | Self::Lost(_) | Self::Output(_) => EXIT_DIFFERS,
            Self::Record(_) => EXIT_USAGE,
        }
    }
}

/// Reads the command line, does what it says, and answers the exit code.
pub(crate) fn run() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.command {
        Command::Run(command) => command.run(cli.home).map_err(CommandError::from),
        Command::Reap(command) => command.run(cli.home, cli.json).map_err(CommandError::from),
        Command::Status(command) => command.run(cli.home, cli.json).map_err(CommandError::from),
        Command::Sessions(command) => command.run(cli.home, cli.json).map_err(CommandError::from),
        Command::Replay(replay) => replay.run(cli.home, cli.json),
        Command::Record(command) => command.run(cli.home.as_deref()),
        Command::Routes => routes(cli.json),
    };
    done.unwrap_or_else(|error| {
        eprintln!("turnhost-supervisor: {error}");
        error.exit_code().into()
    })
}

impl Replay {
    fn run(self, home: Option<PathBuf>, json: bool) -> Result<ExitCode, CommandError> {
        let (fixtures, bad): (Vec<_>, Vec<_>) = self
            .files
            .iter()
            .map(|file| Fixture::read(file))
            .partition(Result::is_ok);
        if !bad.is_empty() {
            return Err(CommandError::Fixtures(
                bad.into_iter().filter_map(Result::err).collect(),
            ));
        }
        let fixtures: Vec<_> = fixtures.into_iter().filter_map(Result::ok).collect();
        let jobs = match self.jobs {
            Some(jobs) => jobs.into(),
            // Hosts that share a home would meet in it.
            None if home.is_some() => 1,
            None => fixtures.len().min(MAX_JOBS),
        };
        let supervisor = (!self.bare).then(std::env::current_exe).transpose();
        let options = Options {
            host: self.host.unwrap_or_else(default_host),
            supervisor: supervisor.map_err(CommandError::Own)?,
            home,
        };
        let mut good = true;
        play_all(&fixtures, &options, jobs, |report| {
            good &= report.is_good();
            print(&report, json)
        })?;
        Ok(if good {
            ExitCode::SUCCESS
        } else {
            EXIT_DIFFERS.into()
        })
    }
}

impl Record {
    fn run(self, home: Option<&Path>) -> Result<ExitCode, CommandError> {
        let recorded = record(&self.file, &self.argv, home)?;
        match recorded.lost {
            None => Ok(recorded.exit_code.into()),
            Some(lost) => Err(CommandError::Lost(lost)),
        }
    }
}

/// Plays `fixtures`, `jobs` at a time, and shows each report in the order of the fixtures.
fn play_all(
    fixtures: &[Fixture],
    options: &Options,
    jobs: usize,
    mut show: impl FnMut(Report) -> io::Result<()>,
) -> Result<(), CommandError> {
    let next = AtomicUsize::new(0);
    let (sender, reports) = mpsc::channel();
    thread::scope(|scope| {
        for job in 0..jobs {
            let (sender, next) = (sender.clone(), &next);
            let player = move || {
                while let Some((index, fixture)) = {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    fixtures.get(index).map(|fixture| (index, fixture))
                } {
                    if sender.send((index, play(fixture, options))).is_err() {
                        break;
                    }
                }
            };
            let thread = thread::Builder::new().name(format!("replay-{job}"));
            thread
                .spawn_scoped(scope, player)
                .map_err(CommandError::Thread)?;
        }
        drop(sender);
        let mut waiting = BTreeMap::new();
        let mut shown = 0;
        for (index, report) in reports {
            waiting.insert(index, report?);
            while let Some(report) = waiting.remove(&shown) {
                show(report)?;
                shown += 1;
            }
        }
        Ok(())
    })
}

fn print(report: &Report, json: bool) -> io::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer(&mut out, report)?;
        out.write_all(b"\n")
    } else {
        writeln!(out, "{}", report.to_string().trim_end())
    }
}

fn routes(json: bool) -> Result<ExitCode, CommandError> {
    let mut out = io::stdout().lock();
    if json {
        let table: serde_json::Map<_, _> = ROUTES
            .iter()
            .map(|(name, class)| ((*name).to_owned(), class.name().into()))
            .collect();
        writeln!(out, "{}", serde_json::Value::from(table))?;
    } else {
        let width = ROUTES.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, class) in ROUTES {
            writeln!(out, "{name:width$}  {class}")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
