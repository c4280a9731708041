//! How a test starts its host.

use std::ffi::OsString;
use std::path::PathBuf;

/// How a host is started.
#[derive(Debug, Default, Clone)]
pub struct Options {
    pub(crate) args: Vec<OsString>,
    pub(crate) env: Vec<(OsString, OsString)>,
    pub(crate) home: Option<PathBuf>,
    pub(crate) cwd: Option<PathBuf>,
    pub(crate) without_home_flag: bool,
    pub(crate) shell: Option<String>,
    pub(crate) max_frame_bytes: Option<usize>,
    pub(crate) heartbeat_secs: Option<String>,
    pub(crate) forgets_deltas: bool,
}

impl Options {
    /// A host in a home of its own, without heartbeats. `Options::default()` gives no flag at all
    /// but the home.
    #[must_use]
    pub fn new() -> Self {
        Self::default().heartbeat_secs("0")
    }

    /// Sets `--heartbeat-secs`.
    #[must_use]
    pub fn heartbeat_secs(mut self, seconds: &str) -> Self {
        self.heartbeat_secs = Some(seconds.to_owned());
        self
    }

    /// The same, which also plays the steps that break a host on purpose.
    #[must_use]
    pub fn with_faults() -> Self {
        Self::new().args(["--allow-faults"])
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds a variable. The host sees `PATH`, `HOME` (its home) and what is added, nothing else.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Uses `home`, which outlives the host.
    #[must_use]
    pub fn home(mut self, home: impl Into<PathBuf>) -> Self {
        self.home = Some(home.into());
        self
    }

    /// Starts the host in `cwd`.
    #[must_use]
    pub fn cwd(mut self, cwd: impl Into<PathBuf>) -> Self {
        self.cwd = Some(cwd.into());
        self
    }

    /// Leaves `--home` out: the environment tells the home.
    #[must_use]
    pub fn without_home_flag(mut self) -> Self {
        self.without_home_flag = true;
        self
    }

    /// Sets `--max-frame-bytes`, and holds the host to it.
    #[must_use]
    pub fn max_frame_bytes(mut self, bytes: usize) -> Self {
        self.max_frame_bytes = Some(bytes);
        self.args(["--max-frame-bytes".to_owned(), bytes.to_string()])
    }

    /// Checks deltas but does not keep them, for a test that causes millions.
    #[must_use]
    pub fn forget_deltas(mut self) -> Self {
        self.forgets_deltas = true;
        self
    }

    /// Lets a shell start the host, which is then no child of the test. `script` finds the host's
    /// command line in `"$@"`, and descriptor 3 is the standard input that the host should get (a
    /// shell gives `/dev/null` to what it starts with `&`).
    #[must_use]
    pub fn shell(mut self, script: &str) -> Self {
        self.shell = Some(format!("exec 3<&0; {script}"));
        self
    }
}
