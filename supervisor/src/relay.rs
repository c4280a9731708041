//! `run`: stands between a gateway on stdin and stdout and one host.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::pipe;
use turnhost_protocol::config::{Config, ConfigError};
use turnhost_protocol::home::{Home, HomeError};
use turnhost_protocol::signal::{is_ignored, unblock};

use crate::child::HostCommand;
use crate::core::{EndCode, RespawnRules, Rules, from_ms};
use crate::driver::{Driver, Parts};
use crate::environment::{EnvFlag, environment};
use crate::reap::{ReapError, Reaped, reap};
use crate::registry::{LockError, Registry};
use crate::transport::{FdSink, FdSource};

/// How a host is supervised.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The home of the host and of its record.
    pub home: Home,
    /// Where the record lies, if not in the home.
    pub registry: Option<PathBuf>,
    /// The command line of the host.
    pub argv: Vec<OsString>,
    /// The build that the host has to be; empty for any.
    pub build_sha: String,
    /// Seconds between heartbeats of a host that does not say; `None` takes the environment's,
    /// then the config's, then 15.
    pub heartbeat_secs: Option<f64>,
    /// Longest line, in bytes.
    pub max_frame_bytes: usize,
    /// The budget of restarts.
    pub respawn: RespawnRules,
    /// Variables that the host gets beyond the list.
    pub env: Vec<EnvFlag>,
}

/// Why nothing is supervised.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The home cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The config cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The home is supervised already, or cannot be locked.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// What a dead supervisor left cannot be looked after.
    #[error(transparent)]
    Reap(#[from] ReapError),
    /// The first host did not start.
    #[error("{0}")]
    FirstHost(String),
    /// Something that this process needs of the system.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl StartError {
    pub(crate) fn system(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { action, source }
    }
}

/// A home that is locked, cleaned of orphans, and ready for a first host.
pub(crate) struct Prepared {
    pub(crate) rules: Rules,
    pub(crate) command: HostCommand,
    pub(crate) registry: Registry,
}

impl Prepared {
    pub(crate) fn new(settings: Settings) -> Result<Self, StartError> {
        settings.home.open()?;
        let config = Config::read(&settings.home.config())?;
        let registry = Registry::lock(&settings.home, settings.registry)?;
        for reaped in reap(&registry)? {
            let Reaped { path, outcome, pid } = reaped;
            let pid = pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
            tracing::info!(
                "orphan of an earlier supervisor: {outcome}{pid}, {}",
                path.display()
            );
        }
        let heartbeat_secs = heartbeat_secs(settings.heartbeat_secs, &config);
        let home = settings.home.path();
        let environment = environment(
            std::env::vars_os(),
            &config,
            &settings.env,
            home,
            heartbeat_secs,
        );
        let mut homes = vec![home.to_owned()];
        homes.extend(std::fs::canonicalize(home));
        Ok(Self {
            rules: Rules {
                max_frame_bytes: settings.max_frame_bytes,
                homes,
                build_sha: settings.build_sha,
                // The whole number of milliseconds that is nearest.
                heartbeat: from_ms((heartbeat_secs * 1_000.0) as u64),
                respawn: settings.respawn,
                hello_wait: from_ms(turnhost_protocol::limits::HELLO_WAIT_MS),
            },
            command: HostCommand::new(settings.argv, environment),
            registry,
        })
    }
}

/// The interval of the flag, else of the environment, else of the config, else the default.
fn heartbeat_secs(flag: Option<f64>, config: &Config) -> f64 {
    let names = [
        "TURNHOST_HEARTBEAT_SECS",
        "HERMES_COMPUTE_HOST_HEARTBEAT_SECS",
    ];
    let set = names.iter().find_map(|name| {
        let value = std::env::var(name).ok().filter(|value| !value.is_empty())?;
        let number = value
            .trim()
            .parse()
            .map_err(|_| "it is no number".to_owned());
        let checked = number.and_then(turnhost_protocol::config::check_heartbeat_secs);
        if let Err(why) = &checked {
            tracing::warn!("{name}={value:?} is ignored: {why}");
        }
        checked.ok()
    });
    flag.or(set)
        .or(config.host.heartbeat_secs)
        .unwrap_or(turnhost_protocol::limits::HEARTBEAT_SECS as f64)
}

/// Supervises a host for the gateway on stdin and stdout until one of them is done. The calling
/// thread has to be the process's first: the host takes its end for the supervisor's.
///
/// # Errors
/// The home cannot be supervised.
pub fn run(settings: Settings) -> Result<EndCode, StartError> {
    // Before anything else, so that no signal ends this process without its host.
    unblock(&[SIGTERM, SIGINT, SIGHUP, SIGCHLD]).map_err(StartError::system("take signals"))?;
    let mut ends = vec![SIGTERM, SIGINT];
    // Whoever starts a supervisor with `nohup` means it.
    ends.extend(Some(SIGHUP).filter(|signal| !is_ignored(*signal)));
    let terminated = signal_pipe(&ends)?;
    let child_ended = signal_pipe(&[SIGCHLD])?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(|error| StartError::system("become a child subreaper")(error.into()))?;
    let prepared = Prepared::new(settings)?;
    let input = io::stdin().as_fd().try_clone_to_owned();
    let output = io::stdout().as_fd().try_clone_to_owned();
    let parts = Parts {
        rules: prepared.rules,
        command: prepared.command,
        registry: prepared.registry,
        input: FdSource::new(input.map_err(StartError::system("use stdin"))?),
        output: FdSink::new(output.map_err(StartError::system("use stdout"))?),
        terminated: Some(terminated),
        child_ended: Some(child_ended),
    };
    Ok(Driver::new(parts, Box::new(|_, _| {})).run())
}

/// A pipe that becomes readable when one of `signals` comes.
fn signal_pipe(signals: &[i32]) -> Result<OwnedFd, StartError> {
    let failed = |error| StartError::system("take signals")(error);
    let (reader, writer) = std::os::unix::net::UnixStream::pair().map_err(failed)?;
    for signal in signals {
        let writer = writer.try_clone().map_err(failed)?;
        pipe::register(*signal, writer).map_err(failed)?;
    }
    Ok(reader.into())
}
