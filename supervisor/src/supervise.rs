//! The commands that supervise: `run`, `reap`, `status`, `sessions`.

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use turnhost_protocol::config::{check_heartbeat_secs, check_max_frame_bytes};
use turnhost_protocol::home::{Home, HomeError};
use turnhost_protocol::limits::{MAX_FRAME_BYTES, RESPAWN_MAX};
use turnhost_supervisor::core::RespawnRules;
use turnhost_supervisor::reap::{Outcome, ReapError, reap};
use turnhost_supervisor::registry::{LockError, Registry};
use turnhost_supervisor::relay::{self, Settings, StartError};
use turnhost_supervisor::status::Status;
use turnhost_supervisor::{EnvFlag, default_host, log};

/// The command line or the configuration is wrong.
const EXIT_USAGE: u8 = 2;
/// The first host could not be started.
const EXIT_NO_HOST: u8 = 69;
/// Another supervisor holds the home.
const EXIT_HELD: u8 = 75;

/// Relay frames between stdin and stdout and a host that is kept running
///
/// Exit codes: 0 orderly end, 2 wrong flags or configuration, 69 the first host could not be
/// started, 70 stdin closed after no host was started any more, 75 another supervisor holds the
/// home.
#[derive(Args)]
pub(crate) struct Run {
    /// Where the record of the host lies [default: HOME/state/compute-host.json]
    #[arg(long, value_name = "FILE")]
    registry: Option<PathBuf>,
    /// Restarts within 300 s before it stops trying
    #[arg(long, value_name = "N", default_value_t = RESPAWN_MAX)]
    respawn_max: usize,
    /// Seconds between heartbeats, 0 turns them off [default: TURNHOST_HEARTBEAT_SECS,
    /// HERMES_COMPUTE_HOST_HEARTBEAT_SECS, the config or 15]
    #[arg(long, value_name = "SECS", value_parser = parse_heartbeat_secs)]
    heartbeat_secs: Option<f64>,
    /// Longest line in bytes, without its line end
    #[arg(long, value_name = "BYTES", default_value_t = MAX_FRAME_BYTES,
          value_parser = parse_max_frame_bytes)]
    max_frame_bytes: usize,
    /// The build that the host has to be [default: any]
    #[arg(long, value_name = "SHA", default_value = "")]
    expect_build_sha: String,
    /// A variable that the host gets beyond the usual ones; may be given again
    #[arg(long, value_name = "NAME[=VALUE]", value_parser = EnvFlag::parse)]
    env: Vec<EnvFlag>,
    /// The command line of the host [default: the turnhost beside this program, else in PATH]
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "HOST ARGV"
    )]
    argv: Vec<OsString>,
}

/// End a host that a dead supervisor left behind, and print what became of it
#[derive(Args)]
pub(crate) struct Reap {
    /// Where the record of the host lies [default: HOME/state/compute-host.json]
    #[arg(long, value_name = "FILE")]
    registry: Option<PathBuf>,
}

/// Show which supervisor and which host use the home
#[derive(Args)]
pub(crate) struct ShowStatus {
    /// Where the record of the host lies [default: HOME/state/compute-host.json]
    #[arg(long, value_name = "FILE")]
    registry: Option<PathBuf>,
}

/// List the stored sessions, or show one: runs `turnhost sessions`
#[derive(Args)]
pub(crate) struct Sessions {
    /// The session to show
    key: Option<String>,
}

/// Why one of these commands has no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SuperviseError {
    #[error(transparent)]
    Home(#[from] HomeError),
    #[error(transparent)]
    Start(#[from] StartError),
    #[error(transparent)]
    Lock(#[from] LockError),
    #[error(transparent)]
    Reap(#[from] ReapError),
    #[error("cannot read the status: {0}")]
    Status(io::Error),
    #[error("cannot run {}: {source}", program.display())]
    Sessions { program: PathBuf, source: io::Error },
    #[error("cannot write the result: {0}")]
    Output(#[from] io::Error),
}

impl SuperviseError {
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Lock(LockError::Held { .. })
            | Self::Start(StartError::Lock(LockError::Held { .. })) => EXIT_HELD,
            Self::Start(StartError::Config(_)) => EXIT_USAGE,
            _ => EXIT_NO_HOST,
        }
    }
}

fn parse_heartbeat_secs(text: &str) -> Result<f64, String> {
    let number = text
        .parse()
        .map_err(|_| "must be a number of seconds".to_owned());
    number.and_then(check_heartbeat_secs)
}

fn parse_max_frame_bytes(text: &str) -> Result<usize, String> {
    let number = text
        .parse()
        .map_err(|_| "must be a number of bytes".to_owned());
    number.and_then(check_max_frame_bytes)
}

fn find_home(flag: Option<PathBuf>) -> Result<Home, HomeError> {
    Home::find(flag, |name| std::env::var_os(name))
}

impl Run {
    pub(crate) fn run(self, home: Option<PathBuf>) -> Result<ExitCode, SuperviseError> {
        log::init();
        let argv = if self.argv.is_empty() {
            vec![default_host().into()]
        } else {
            self.argv
        };
        let code = relay::run(Settings {
            home: find_home(home)?,
            registry: self.registry,
            argv,
            build_sha: self.expect_build_sha,
            heartbeat_secs: self.heartbeat_secs,
            max_frame_bytes: self.max_frame_bytes,
            respawn: RespawnRules {
                max: self.respawn_max,
                ..RespawnRules::default()
            },
            env: self.env,
        })?;
        Ok(ExitCode::from(code as u8))
    }
}

impl Reap {
    pub(crate) fn run(self, home: Option<PathBuf>, json: bool) -> Result<ExitCode, SuperviseError> {
        let registry = Registry::lock(&find_home(home)?, self.registry)?;
        let reaped = reap(&registry)?;
        // The home's own record counts, unless there was none.
        let found = reaped.iter().find(|reaped| reaped.outcome != Outcome::None);
        let Some(shown) = found.or(reaped.first()) else {
            return Ok(ExitCode::SUCCESS);
        };
        let mut out = io::stdout().lock();
        if json {
            let (outcome, path) = (shown.outcome.name(), shown.path.display().to_string());
            let line = serde_json::json!({"outcome": outcome, "registry": path, "pid": shown.pid});
            writeln!(out, "{line}")?;
        } else {
            writeln!(out, "{}", shown.outcome)?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl ShowStatus {
    pub(crate) fn run(self, home: Option<PathBuf>, json: bool) -> Result<ExitCode, SuperviseError> {
        let status =
            Status::read(&find_home(home)?, self.registry).map_err(SuperviseError::Status)?;
        let mut out = io::stdout().lock();
        if json {
            let line = serde_json::to_string(&status).map_err(io::Error::other)?;
            writeln!(out, "{line}")?;
        } else {
            write!(out, "{status}")?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Sessions {
    /// Becomes `turnhost sessions`: what it prints and its exit code are this command's.
    pub(crate) fn run(self, home: Option<PathBuf>, json: bool) -> Result<ExitCode, SuperviseError> {
        let program = default_host();
        let mut command = std::process::Command::new(&program);
        command.arg("sessions");
        if let Some(home) = home {
            command.arg("--home").arg(home);
        }
        if json {
            command.arg("--json");
        }
        let source = command.args(self.key).exec();
        Err(SuperviseError::Sessions { program, source })
    }
}
