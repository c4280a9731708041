//! The environment of a host: built once, from a list of what may pass.
//!
//! Invariant: what is not on the list does not reach the host, and the token of the dashboard
//! never does, however it is asked for. There is no second merge.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use turnhost_protocol::config::Config;

/// Never passed on, whatever asks for it.
const NEVER: &str = "HERMES_DASHBOARD_SESSION_TOKEN";

/// Names that pass.
const NAMES: [&str; 31] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "TERM",
    "TZ",
    "TMPDIR",
    "LANG",
    "DISPLAY",
    "XAUTHORITY",
    "DBUS_SESSION_BUS_ADDRESS",
    "AT_SPI_BUS_ADDRESS",
    "SSH_AUTH_SOCK",
    "http_proxy",
    "https_proxy",
    "ftp_proxy",
    "all_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "FTP_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "HERMES_HOME",
    "HERMES_TUI_RPC_POOL_WORKERS",
    "HERMES_COMPUTE_HOST_HEARTBEAT_SECS",
    "OPENAI_BASE_URL",
    "OPENAI_API_KEY",
    "RUST_LOG",
    "RUST_BACKTRACE",
];

/// Beginnings of names that pass.
const PREFIXES: [&str; 4] = ["LC_", "XDG_", "SSL_CERT_", "TURNHOST_"];

/// A variable that `--env` asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EnvFlag {
    /// `NAME`: as it is here.
    Pass(OsString),
    /// `NAME=VALUE`
    Set(OsString, OsString),
}

impl EnvFlag {
    /// Reads `NAME` or `NAME=VALUE`.
    ///
    /// # Errors
    /// A name that is empty, or the one that never passes.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (name, value) = match text.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (text, None),
        };
        match name {
            "" => Err("expected NAME or NAME=VALUE".to_owned()),
            NEVER => Err(format!("{NEVER} is never passed to a host")),
            _ => Ok(match value {
                Some(value) => Self::Set(name.into(), value.into()),
                None => Self::Pass(name.into()),
            }),
        }
    }
}

/// The whole environment of a host: what may pass of `own`, what `config` and `flags` name, and
/// the home and the heartbeat interval that the supervisor uses.
pub(crate) fn environment(
    own: impl IntoIterator<Item = (OsString, OsString)>,
    config: &Config,
    flags: &[EnvFlag],
    home: &Path,
    heartbeat_secs: f64,
) -> BTreeMap<OsString, OsString> {
    let own: BTreeMap<OsString, OsString> = own.into_iter().collect();
    let mut passed: BTreeMap<OsString, OsString> = own
        .iter()
        .filter(|(name, _)| may_pass(name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    let asked = config.supervisor.env_pass.iter().map(OsStr::new);
    let key = config.chat.api_key_env.as_deref().map(OsStr::new);
    for name in asked.chain(key) {
        if let Some(value) = own.get(name) {
            passed.insert(name.to_owned(), value.clone());
        }
    }
    for flag in flags {
        match flag {
            EnvFlag::Set(name, value) => {
                passed.insert(name.clone(), value.clone());
            }
            EnvFlag::Pass(name) => {
                if let Some(value) = own.get(name) {
                    passed.insert(name.clone(), value.clone());
                }
            }
        }
    }
    passed.insert("TURNHOST_HOME".into(), home.into());
    for name in [
        "TURNHOST_HEARTBEAT_SECS",
        "HERMES_COMPUTE_HOST_HEARTBEAT_SECS",
    ] {
        passed.insert(name.into(), heartbeat_secs.to_string().into());
    }
    passed.remove(OsStr::new(NEVER));
    passed
}

fn may_pass(name: &OsStr) -> bool {
    name.to_str().is_some_and(|name| {
        NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(list: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
        list.iter()
            .map(|(name, value)| ((*name).into(), (*value).into()))
            .collect()
    }

    #[test]
    fn only_the_list_and_what_is_asked_for_passes() {
        let own = pairs(&[
            ("PATH", "/bin"),
            ("LC_ALL", "C"),
            ("TURNHOST_LOG", "debug"),
            ("TURNHOST_HOME", "/other"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("MY_KEY", "k"),
            ("LISTED", "l"),
            ("FLAGGED", "f"),
            (NEVER, "token"),
        ]);
        let mut config = Config::default();
        config.chat.api_key_env = Some("MY_KEY".to_owned());
        config.supervisor.env_pass = vec!["LISTED".into(), "MISSING".into(), NEVER.into()];
        let flags = ["FLAGGED", "SET=a=b", "ABSENT"].map(|text| EnvFlag::parse(text).unwrap());
        let passed = environment(own, &config, &flags, Path::new("/home/x"), 0.5);
        let expected = pairs(&[
            ("FLAGGED", "f"),
            ("HERMES_COMPUTE_HOST_HEARTBEAT_SECS", "0.5"),
            ("LC_ALL", "C"),
            ("LISTED", "l"),
            ("MY_KEY", "k"),
            ("PATH", "/bin"),
            ("SET", "a=b"),
            ("TURNHOST_HEARTBEAT_SECS", "0.5"),
            ("TURNHOST_HOME", "/home/x"),
            ("TURNHOST_LOG", "debug"),
        ]);
        assert_eq!(passed.into_iter().collect::<Vec<_>>(), expected);
    }

    #[test]
    fn the_token_never_passes() {
        assert!(EnvFlag::parse(&format!("{NEVER}=x")).is_err());
        assert!(EnvFlag::parse(NEVER).is_err());
        assert!(EnvFlag::parse("=x").is_err());
        let flag = EnvFlag::Set(NEVER.into(), "x".into());
        let passed = environment([], &Config::default(), &[flag], Path::new("/h"), 15.0);
        assert!(!passed.contains_key(OsStr::new(NEVER)));
        assert_eq!(passed[OsStr::new("TURNHOST_HEARTBEAT_SECS")], "15");
    }
}
