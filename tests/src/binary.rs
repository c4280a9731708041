//! Where the programs under test are, built when they are not up to date.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The host, built once for each test process. Cargo holds its own lock while it builds, so
/// several test processes may ask at once.
#[must_use]
pub fn turnhost() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| build("turnhost"))
}

/// The supervisor.
#[must_use]
pub fn supervisor() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| build("turnhost-supervisor"))
}

/// A host that misbehaves on command.
#[must_use]
pub fn fake_host() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| build("turnhost-fake-host"))
}

/// The floor program of the benchmarks.
#[must_use]
pub fn floor() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| build("turnhost-floor"))
}

fn build(name: &str) -> PathBuf {
    use_default_signals();
    let profile_folder = profile_folder();
    let profile = match profile_folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(other) => other,
    };
    let target = profile_folder
        .parent()
        .expect("a profile's folder lies in the target folder");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    // The whole workspace, so that features are unified as they were for the tests themselves and
    // nothing is compiled a second time.
    let status = Command::new(cargo)
        .args(["build", "--workspace", "--quiet", "--locked", "--bin", name])
        .args(["--profile", profile, "--target-dir"])
        .arg(target)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .expect("cargo can be started");
    assert!(status.success(), "cargo build of {name}: {status}");
    let path = profile_folder.join(name);
    assert!(path.is_file(), "{} was not built", path.display());
    path
}

/// Signals that whoever runs the tests ignores (`nohup`, a job in the background) would be ignored
/// by the programs under test too.
fn use_default_signals() {
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
        // SAFETY: it sets a disposition of this process to the default, which runs no code.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// `target/<profile>`: the test program itself lies in `deps` below it.
fn profile_folder() -> PathBuf {
    let own = std::env::current_exe().expect("a process knows its program");
    own.ancestors()
        .find(|folder| folder.ends_with("deps"))
        .and_then(Path::parent)
        .expect("cargo puts tests and benches into target/<profile>/deps")
        .to_owned()
}
