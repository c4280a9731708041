//! What `status` shows: read from the home and from `/proc`, without touching either.

use std::fmt;
use std::io;
use std::path::PathBuf;

use serde::Serialize;
use turnhost_protocol::home::Home;
use turnhost_protocol::process::{Identity, Stat, resident_mib};

use crate::registry::{Content, Holder, Record, read_record};

/// How a home is supervised.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Status {
    /// The home.
    #[serde(serialize_with = "turnhost_protocol::json::lossy_path")]
    pub home: PathBuf,
    /// `running`, `orphaned` (a host without its supervisor), `hostless` (a supervisor without a
    /// host: it starts one, waits to, or gave up), or `stopped`.
    pub state: &'static str,
    /// The supervisor that holds the home.
    pub supervisor_pid: Option<i32>,
    /// The host that is registered and runs.
    pub host: Option<HostStatus>,
}

/// A host that runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HostStatus {
    /// Its process.
    pub pid: i32,
    /// From its hello.
    pub boot_id: String,
    /// From its hello.
    pub build_sha: String,
    /// Seconds since 1970.
    pub started_at: f64,
    /// Seconds since then.
    pub uptime_secs: f64,
    /// Memory in RAM, in MiB.
    pub rss_mb: f64,
    /// Its command line.
    pub argv: Vec<String>,
}

impl Status {
    /// Looks at `home`; `registry` is where the record lies, if not there.
    ///
    /// # Errors
    /// The folder of the record cannot be read.
    pub fn read(home: &Home, registry: Option<PathBuf>) -> io::Result<Self> {
        let supervisor_pid = Holder::read(&home.lock())
            .filter(Holder::is_alive)
            .map(|holder| holder.supervisor_pid);
        let registry = registry.unwrap_or_else(|| home.registry());
        let host = match read_record(&registry)? {
            Some(Content::Ours(record)) => HostStatus::of(*record),
            Some(Content::Reference(_) | Content::Invalid) | None => None,
        };
        Ok(Self {
            home: home.path().to_owned(),
            state: match (supervisor_pid, &host) {
                (Some(_), Some(_)) => "running",
                (None, Some(_)) => "orphaned",
                (Some(_), None) => "hostless",
                (None, None) => "stopped",
            },
            supervisor_pid,
            host,
        })
    }
}

impl HostStatus {
    fn of(record: Record) -> Option<Self> {
        let identity = Identity::of(record.host_pid).ok()??;
        if !record.names(&identity) {
            return None;
        }
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let now = now.map_or(0.0, |since| since.as_secs_f64());
        Some(Self {
            pid: record.host_pid,
            boot_id: record.boot_id,
            build_sha: record.build_sha,
            started_at: record.started_at,
            uptime_secs: (now - record.started_at).max(0.0),
            rss_mb: resident_mib(record.host_pid.unsigned_abs()).unwrap_or_default(),
            argv: record.argv,
        })
    }
}

impl Holder {
    fn is_alive(&self) -> bool {
        matches!(Stat::of(self.supervisor_pid), Ok(Some(stat))
            if stat.start_ticks == self.supervisor_start_ticks && !stat.is_zombie())
    }
}

impl fmt::Display for Status {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(formatter, "home        {}", self.home.display())?;
        writeln!(formatter, "state       {}", self.state)?;
        if let Some(pid) = self.supervisor_pid {
            writeln!(formatter, "supervisor  pid {pid}")?;
        }
        if let Some(host) = &self.host {
            writeln!(formatter, "host        pid {}", host.pid)?;
            writeln!(formatter, "uptime      {:.0} s", host.uptime_secs)?;
            writeln!(formatter, "memory      {:.1} MiB", host.rss_mb)?;
            writeln!(formatter, "build       {}", host.build_sha)?;
            writeln!(formatter, "command     {}", host.argv.join(" "))?;
        }
        Ok(())
    }
}
