//! Flags, environment and `config.yaml`, in this order of weight: SPEC §14.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;
use turnhost_protocol::config::{
    AgentName, Config, ConfigError, check_heartbeat_secs, check_max_frame_bytes,
    check_max_queued_turns, check_workers,
};
use turnhost_protocol::home::{Home, HomeError};
use turnhost_protocol::limits;

use crate::agent::script::{ScriptAgent, ScriptFileError};
use crate::turn::NO_CHAT;

/// Runs agent turns: newline JSON on stdin and stdout, logs on stderr and in HOME/logs.
///
/// Exit codes: 0 orderly end, 1 cannot start, 2 wrong flags or configuration.
#[derive(Debug, Parser)]
#[command(name = "turnhost", version, max_term_width = 100)]
pub struct Flags {
    /// Folder of config, store and logs [default: TURNHOST_HOME, HERMES_HOME or ~/.turnhost]
    #[arg(long, value_name = "DIR")]
    home: Option<PathBuf>,

    /// Turns that compute at once [default: TURNHOST_WORKERS, HERMES_TUI_RPC_POOL_WORKERS or 8]
    #[arg(long, value_name = "N", value_parser = parse_workers)]
    workers: Option<usize>,

    /// Seconds between heartbeats, 0 turns them off [default: TURNHOST_HEARTBEAT_SECS,
    /// HERMES_COMPUTE_HOST_HEARTBEAT_SECS or 15]
    #[arg(long, value_name = "SECS", value_parser = parse_heartbeat_secs, allow_negative_numbers = true)]
    heartbeat_secs: Option<f64>,

    /// Longest line in bytes, without its line end [default: 33554432]
    #[arg(long, value_name = "BYTES", value_parser = parse_max_frame_bytes)]
    max_frame_bytes: Option<usize>,

    /// Turns that may wait for a worker [default: 256]
    #[arg(long, value_name = "N", value_parser = parse_max_queued_turns)]
    max_queued_turns: Option<usize>,

    /// What runs turns: script [default: `agent:` of the profile's config.yaml, else script]
    #[arg(long, value_name = "NAME")]
    agent: Option<AgentName>,

    /// Steps of the script agent: {"turns": [[step, …], …]}, one list for each turn
    #[arg(long, value_name = "FILE")]
    script: Option<PathBuf>,

    /// Let scripts panic, abort, exit and hang on purpose
    #[arg(long)]
    allow_faults: bool,

    /// What `hello` gives as build_sha
    #[arg(long, value_name = "SHA", default_value = "unknown")]
    build_sha: String,

    /// Ask the kernel for a signal when the parent, whose pid this is, ends. Only for a parent
    /// whose thread that starts the host lives as long as itself
    #[arg(long, value_name = "PPID", value_parser = clap::value_parser!(i32).range(1..))]
    parent_death_signal: Option<i32>,
}

fn parse_workers(text: &str) -> Result<usize, String> {
    text.parse()
        .map_err(|_| "must be a whole number".to_owned())
        .and_then(check_workers)
}

fn parse_max_queued_turns(text: &str) -> Result<usize, String> {
    text.parse()
        .map_err(|_| "must be a whole number".to_owned())
        .and_then(check_max_queued_turns)
}

fn parse_heartbeat_secs(text: &str) -> Result<f64, String> {
    text.parse()
        .map_err(|_| "must be a number of seconds".to_owned())
        .and_then(check_heartbeat_secs)
}

fn parse_max_frame_bytes(text: &str) -> Result<usize, String> {
    text.parse()
        .map_err(|_| "must be a number of bytes".to_owned())
        .and_then(check_max_frame_bytes)
}

/// What a host runs with.
pub struct Settings {
    /// Its home, opened.
    pub home: Home,
    /// `HERMES_HOME`, or empty.
    pub hermes_home: String,
    /// Turns that compute at once.
    pub workers: usize,
    /// Seconds between heartbeats; 0 for none.
    pub heartbeat_secs: f64,
    /// Longest line, in bytes.
    pub max_frame_bytes: usize,
    /// Turns that may wait for a worker.
    pub max_queued_turns: usize,
    /// `--agent`
    pub agent: Option<AgentName>,
    /// The script agent.
    pub script: ScriptAgent,
    /// What `hello` says.
    pub build_sha: String,
    /// The parent that gave its pid.
    pub parent: Option<i32>,
    /// What is logged.
    pub log_filter: String,
    /// What was wrong and replaced; said once there is a log.
    pub warnings: Vec<String>,
}

/// Settings that no host can run with.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The home cannot be used.
    #[error(transparent)]
    Home(#[from] HomeError),
    /// The config cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The script file cannot be used.
    #[error(transparent)]
    Script(#[from] ScriptFileError),
    /// The agent is not there.
    #[error("{0}")]
    Agent(&'static str),
}

impl SettingsError {
    /// The exit code that tells of it.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Home(_) => 1,
            Self::Config(_) | Self::Script(_) | Self::Agent(_) => 2,
        }
    }
}

impl Settings {
    /// Puts flags, environment and config together.
    ///
    /// # Errors
    /// A home, config, script or agent that cannot be used.
    pub fn new(
        flags: Flags,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, SettingsError> {
        let home = Home::find(flags.home, &variable)?;
        home.open()?;
        let config = Config::read(&home.config())?;
        if flags.agent.or(config.agent) == Some(AgentName::Chat) {
            return Err(SettingsError::Agent(NO_CHAT));
        }
        let mut environment = Environment {
            variable: &variable,
            warnings: Vec::new(),
        };
        let workers = flags
            .workers
            .or_else(|| {
                let names = ["TURNHOST_WORKERS", "HERMES_TUI_RPC_POOL_WORKERS"];
                environment.number(names, limits::WORKERS, raise_workers)
            })
            .or(config.host.workers)
            .unwrap_or(limits::WORKERS);
        let heartbeat_secs = flags
            .heartbeat_secs
            .or_else(|| {
                let names = [
                    "TURNHOST_HEARTBEAT_SECS",
                    "HERMES_COMPUTE_HOST_HEARTBEAT_SECS",
                ];
                environment.number(names, limits::HEARTBEAT_SECS as f64, check_heartbeat_secs)
            })
            .or(config.host.heartbeat_secs)
            .unwrap_or(limits::HEARTBEAT_SECS as f64);
        let text = |name: &str| variable(name).and_then(|value| value.into_string().ok());
        Ok(Self {
            hermes_home: text("HERMES_HOME").unwrap_or_default(),
            workers,
            heartbeat_secs,
            max_frame_bytes: flags
                .max_frame_bytes
                .or(config.host.max_frame_bytes)
                .unwrap_or(limits::MAX_FRAME_BYTES),
            max_queued_turns: flags
                .max_queued_turns
                .or(config.host.max_queued_turns)
                .unwrap_or(limits::MAX_QUEUED_TURNS),
            agent: flags.agent,
            script: ScriptAgent::new(flags.script.as_deref(), flags.allow_faults)?,
            build_sha: flags.build_sha,
            parent: flags.parent_death_signal,
            log_filter: text("TURNHOST_LOG")
                .or_else(|| text("RUST_LOG"))
                .or(config.host.log)
                .unwrap_or_else(|| "info".to_owned()),
            warnings: environment.warnings,
            home,
        })
    }
}

/// The environment sets the pool of the reference, where 1 was allowed: it is raised, not refused.
fn raise_workers(workers: usize) -> Result<usize, String> {
    check_workers(if workers == 0 {
        workers
    } else {
        workers.max(limits::MIN_WORKERS)
    })
}

struct Environment<'a, F> {
    variable: &'a F,
    warnings: Vec<String>,
}

impl<F: Fn(&str) -> Option<OsString>> Environment<'_, F> {
    /// The first of `names` that is set and not empty. A value that cannot be used is said and
    /// replaced by `fallback`.
    fn number<T: std::str::FromStr>(
        &mut self,
        names: [&str; 2],
        fallback: T,
        check: impl FnOnce(T) -> Result<T, String>,
    ) -> Option<T> {
        let (name, value) = names.into_iter().find_map(|name| {
            (self.variable)(name)
                .filter(|value| !value.is_empty())
                .map(|value| (name, value))
        })?;
        let text = value.to_string_lossy();
        let number = text
            .trim()
            .parse()
            .map_err(|_| "it must be a number".to_owned())
            .and_then(check);
        Some(number.unwrap_or_else(|why| {
            let text = turnhost_protocol::json::quoted(&text, 64);
            self.warnings
                .push(format!("{name}={text:?} is ignored: {why}"));
            fallback
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(flags: &[&str], set: &[(&str, &str)], config: &str) -> Result<Settings, String> {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("config.yaml"), config).unwrap();
        let flags = Flags::try_parse_from(["turnhost"].iter().chain(flags))
            .map_err(|error| error.to_string())?;
        let home = OsString::from(home.path());
        Settings::new(flags, |name| match name {
            "TURNHOST_HOME" => Some(home.clone()),
            _ => set
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| value.into()),
        })
        .map_err(|error| error.to_string())
    }

    #[test]
    fn workers_come_from_flags_then_environment_then_config() {
        let check = |flags: &[&str], set: &[(&str, &str)], config: &str, workers, warnings| {
            let settings = settings(flags, set, config).unwrap();
            assert_eq!(
                (settings.workers, settings.warnings.len()),
                (workers, warnings)
            );
        };
        let config = "host: {workers: 5}";
        check(&[], &[], "", 8, 0);
        check(&[], &[], config, 5, 0);
        check(&[], &[("HERMES_TUI_RPC_POOL_WORKERS", "11")], config, 11, 0);
        check(
            &[],
            &[
                ("TURNHOST_WORKERS", "4"),
                ("HERMES_TUI_RPC_POOL_WORKERS", "11"),
            ],
            "",
            4,
            0,
        );
        check(
            &["--workers", "3"],
            &[("TURNHOST_WORKERS", "4")],
            config,
            3,
            0,
        );
        check(
            &[],
            &[("HERMES_TUI_RPC_POOL_WORKERS", "not-an-int")],
            config,
            8,
            1,
        );
        check(&[], &[("TURNHOST_WORKERS", "1")], "", 2, 0);
        check(&[], &[("TURNHOST_WORKERS", "0")], "", 8, 1);
        check(&[], &[("TURNHOST_WORKERS", "-3")], "", 8, 1);
        check(&[], &[("TURNHOST_WORKERS", "")], "", 8, 0);
    }

    #[test]
    fn heartbeats_come_from_flags_then_environment_then_config() {
        let check = |flags: &[&str], set: &[(&str, &str)], seconds: f64| {
            let settings = settings(flags, set, "host: {heartbeat_secs: 3}").unwrap();
            assert!((settings.heartbeat_secs - seconds).abs() < 1e-9);
        };
        check(&[], &[], 3.0);
        check(&[], &[("HERMES_COMPUTE_HOST_HEARTBEAT_SECS", "0.5")], 0.5);
        check(
            &["--heartbeat-secs", "0"],
            &[("TURNHOST_HEARTBEAT_SECS", "7")],
            0.0,
        );
        check(&[], &[("TURNHOST_HEARTBEAT_SECS", "soon")], 15.0);
    }

    #[test]
    fn wrong_flags_say_what_is_allowed() {
        let error = |flags: &[&str]| settings(flags, &[], "").err().unwrap();
        assert!(error(&["--workers", "1"]).contains("workers must be between 2 and 1024, not 1"));
        assert!(error(&["--heartbeat-secs", "x"]).contains("must be a number of seconds"));
        assert!(error(&["--agent", "x"]).contains("expected one of script, chat"));
        assert!(error(&["--agent", "chat"]).contains("not supported by this version"));
        assert!(error(&["--script", "/no/such"]).starts_with("script file /no/such: "));
    }
}
