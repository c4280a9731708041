//! Where things lie in a home.

use std::ffi::OsString;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A home directory: its own config, store, screen and lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home(PathBuf);

/// A home that cannot be used, and what to do.
#[derive(Debug, thiserror::Error)]
pub enum HomeError {
    /// It is not there and cannot be made.
    #[error("cannot make the home {}: {source}; choose another with --home", path.display())]
    Make {
        /// The home.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It cannot be looked at.
    #[error("cannot read the home {}: {source}; choose another with --home", path.display())]
    Read {
        /// The home.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// It is a file.
    #[error("the home {} is no folder; choose another with --home", path.display())]
    NoFolder {
        /// The home.
        path: PathBuf,
    },
    /// Another user could change what lies in it.
    #[error(
        "the home {} belongs to user {owner}, this process runs as user {user}; \
         choose another with --home, or run as its owner",
        path.display()
    )]
    NotOurs {
        /// The home.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The effective user of this process.
        user: u32,
    },
    /// Neither a flag nor the environment names one.
    #[error("no home: give --home, or set TURNHOST_HOME or HOME")]
    Unknown,
}

impl Home {
    /// The home that the environment names: `TURNHOST_HOME`, else `HERMES_HOME`, else
    /// `~/.turnhost`. Empty variables count as absent.
    ///
    /// # Errors
    /// Not even `HOME` is set, or the current folder is gone.
    pub fn find(
        flag: Option<PathBuf>,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, HomeError> {
        let named = |name: &str| {
            variable(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let path = flag
            .or_else(|| named("TURNHOST_HOME"))
            .or_else(|| named("HERMES_HOME"))
            .or_else(|| named("HOME").map(|home| home.join(".turnhost")))
            .ok_or(HomeError::Unknown)?;
        let path = std::path::absolute(&path).map_err(|source| HomeError::Read { path, source })?;
        Ok(Self(path))
    }

    /// The home at `path`, which must be absolute.
    #[must_use]
    pub fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }

    /// Makes the home with mode 0700 where it is missing, and checks that it is ours.
    ///
    /// # Errors
    /// It cannot be made or read, is no folder, or belongs to another user.
    pub fn open(&self) -> Result<(), HomeError> {
        let path = self.0.clone();
        if let Err(source) = make_private_folder(&self.0) {
            return Err(HomeError::Make { path, source });
        }
        let facts = match std::fs::metadata(&self.0) {
            Ok(facts) => facts,
            Err(source) => return Err(HomeError::Read { path, source }),
        };
        if !facts.is_dir() {
            return Err(HomeError::NoFolder { path });
        }
        let (owner, user) = (facts.uid(), rustix::process::geteuid().as_raw());
        if owner != user {
            return Err(HomeError::NotOurs { path, owner, user });
        }
        Ok(())
    }

    /// The folder itself.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// `config.yaml`, which the reference may share.
    #[must_use]
    pub fn config(&self) -> PathBuf {
        self.0.join("config.yaml")
    }

    /// Folder of the log files.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        self.0.join("logs")
    }

    /// Folder of what supervisors keep.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.0.join("state")
    }

    /// The record of the running host.
    #[must_use]
    pub fn registry(&self) -> PathBuf {
        self.state().join("compute-host.json")
    }

    /// The same, as the reference names it.
    #[must_use]
    pub fn reference_registry(&self) -> PathBuf {
        self.state().join("dashboard-compute-host.json")
    }

    /// The lock that a supervisor holds for its life.
    #[must_use]
    pub fn lock(&self) -> PathBuf {
        self.state().join("compute-host.lock")
    }
}

/// Makes `path` and its parents with mode 0700; one that is there stays as it is.
///
/// # Errors
/// What the system says, except that it is there.
pub fn make_private_folder(path: &Path) -> io::Result<()> {
    match std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
    {
        // A file in its place is reported by whoever looks next, with a better sentence.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_win_over_the_environment() {
        let find = |flag: Option<&str>, set: &[(&str, &str)]| {
            Home::find(flag.map(PathBuf::from), |name| {
                set.iter()
                    .find(|(key, _)| *key == name)
                    .map(|(_, value)| OsString::from(value))
            })
            .map(|home| home.path().display().to_string())
            .unwrap_or_else(|error| error.to_string())
        };
        let all = [
            ("TURNHOST_HOME", "/t"),
            ("HERMES_HOME", "/h"),
            ("HOME", "/me"),
        ];
        assert_eq!(find(Some("/f"), &all), "/f");
        assert_eq!(find(None, &all), "/t");
        assert_eq!(
            find(None, &[("TURNHOST_HOME", ""), ("HERMES_HOME", "/h")]),
            "/h"
        );
        assert_eq!(find(None, &all[2..]), "/me/.turnhost");
        assert_eq!(
            find(None, &[]),
            "no home: give --home, or set TURNHOST_HOME or HOME"
        );
    }

    #[test]
    fn a_home_is_made_private_and_must_be_a_folder() {
        use std::os::unix::fs::PermissionsExt;
        let root = tempfile::tempdir().unwrap();
        let home = Home(root.path().join("a/b"));
        home.open().unwrap();
        home.open().unwrap();
        assert_eq!(
            std::fs::metadata(home.path()).unwrap().permissions().mode() & 0o777,
            0o700
        );
        let file = root.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = Home(file.clone()).open().unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "the home {} is no folder; choose another with --home",
                file.display()
            )
        );
        assert!(matches!(
            Home(file.join("x")).open(),
            Err(HomeError::Make { .. })
        ));
    }
}
