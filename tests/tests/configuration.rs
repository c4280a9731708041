//! SPEC §14 and bad moments: flags, environment, `config.yaml`, and homes that cannot be used.
//! Each error names the path or field and what to do.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::json;
use turnhost_tests::host::Exit;
use turnhost_tests::{Host, Options, make_pipe, probe, script_turn, turn};

/// Checks that a host does not start: its exit code, no frame, one line for the user that holds
/// `parts`.
fn check_refused(options: Options, code: i32, parts: &[&str]) {
    let mut host = Host::spawn(options);
    assert_eq!(host.exit(), Exit::Code(code), "{parts:?}");
    assert!(host.frames().is_empty(), "nothing but frames on stdout");
    let stderr = host.stderr();
    for part in parts {
        assert!(stderr.contains(part), "no {part:?} in: {stderr}");
    }
}

/// A host that works: it runs a turn and ends in order.
fn check_works(mut host: Host) -> Host {
    assert_eq!(host.ask(&turn("s", "r", "x")).kind(), "turn.end");
    host.close_stdin();
    assert_eq!(host.exit(), Exit::Code(0));
    host
}

fn home_with_config(text: &str) -> tempfile::TempDir {
    let home = tempfile::tempdir().expect("a temporary folder");
    fs::write(home.path().join("config.yaml"), text).expect("a file");
    home
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[test]
fn a_bad_flag_is_a_usage_error_that_names_it() {
    for (args, part) in [
        (vec!["--no-such-flag"], "--no-such-flag"),
        (vec!["--workers", "many"], "--workers"),
        (vec!["--workers", "1"], "2"),
        (vec!["--heartbeat-secs=-1"], "--heartbeat-secs"),
        (vec!["--heartbeat-secs", "soon"], "--heartbeat-secs"),
        (vec!["--max-frame-bytes", "1023"], "1024"),
        (vec!["--max-frame-bytes", "1073741825"], "1073741824"),
        (vec!["--max-queued-turns", "x"], "--max-queued-turns"),
        (vec!["--agent", "skript"], "script"),
        (vec!["--parent-death-signal", "x"], "--parent-death-signal"),
        (vec!["--home"], "--home"),
        (vec!["surplus"], "surplus"),
    ] {
        // Without the harness's own flags: one may be given only once.
        check_refused(Options::default().args(args), 2, &[part]);
    }
}

#[test]
fn the_smallest_and_the_largest_limit_are_taken() {
    for bytes in [1024, 1024 * 1024 * 1024] {
        let host = Host::start(Options::new().max_frame_bytes(bytes));
        host.ask(&probe("r"));
    }
}

#[test]
fn help_and_version_go_to_stdout_and_end() {
    let run = |flag: &str| {
        let output = Command::new(turnhost_tests::binary::turnhost())
            .arg(flag)
            .stdin(Stdio::null())
            .output()
            .expect("the host can be started");
        assert!(output.status.success(), "{flag}");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    assert!(run("--version").starts_with("turnhost "));
    let help = run("--help");
    for flag in [
        "--home",
        "--workers",
        "--heartbeat-secs",
        "--max-frame-bytes",
        "--allow-faults",
    ] {
        assert!(help.contains(flag), "{flag} is not documented");
    }
}

#[test]
fn a_bad_config_names_file_line_and_what_is_allowed() {
    for (text, line, parts) in [
        ("host:\n  wrkers: 3\n", 2, vec!["wrkers", "workers"]),
        ("host:\n  workers: many\n", 2, vec!["workers"]),
        (
            "# c\nhost:\n  workers: 1\n",
            3,
            vec!["workers", "2", "1024"],
        ),
        ("host:\n  heartbeat_secs: -1\n", 2, vec!["heartbeat_secs"]),
        ("host:\n  max_frame_bytes: 1\n", 2, vec!["1024"]),
        ("agent: skript\n", 1, vec!["skript", "script", "chat"]),
        ("chat:\n  modell: x\n", 2, vec!["modell", "model"]),
        ("supervisor:\n  nope: x\n", 2, vec!["nope", "env_pass"]),
        ("a: b: c\n", 1, vec![]),
    ] {
        let home = home_with_config(text);
        let place = format!("{}:{line}", home.path().join("config.yaml").display());
        let mut parts = parts;
        parts.push(&place);
        check_refused(Options::new().home(home.path()), 2, &parts);
    }
}

#[test]
fn a_config_of_the_reference_is_accepted() {
    let home = home_with_config(
        "model:\n  default: some/model\n  base_url: http://127.0.0.1:1/v1\n  api_key: secret\n\
         agent:\n  max_turns: 90\n  personalities: {helpful: You are helpful.}\n\
         terminal:\n  backend: local\n  timeout: 180\ntoolsets: [all]\nmcp_servers: {}\n\
         display: {compact: false}\nunknown_key: [1, 2, {a: b}]\n",
    );
    let host = check_works(Host::start(Options::new().home(home.path())));
    assert_eq!(host.hello()["workers"], 8);
    // An agent that is a mapping is the reference's: ours is the default.
    assert_eq!(
        host.wait_event("s", "message.complete").payload()["text"],
        "x"
    );
}

#[test]
fn flags_win_over_the_environment_and_that_over_the_config() {
    let home = home_with_config("host:\n  workers: 3\n  heartbeat_secs: 7\nagent: script\n");
    let hello = |options: Options| {
        let host = Host::start(options.home(home.path()));
        let hello = host.hello();
        (hello["workers"].as_u64(), hello["heartbeat_secs"].as_f64())
    };
    let own = |options: Options| {
        options
            .env("TURNHOST_WORKERS", "4")
            .env("TURNHOST_HEARTBEAT_SECS", "8")
    };
    let reference = |options: Options| {
        options
            .env("HERMES_TUI_RPC_POOL_WORKERS", "5")
            .env("HERMES_COMPUTE_HOST_HEARTBEAT_SECS", "9")
    };
    let plain = Options::default;
    let flags = || plain().args(["--workers", "6", "--heartbeat-secs", "10"]);
    assert_eq!(hello(plain()), (Some(3), Some(7.0)));
    assert_eq!(hello(reference(plain())), (Some(5), Some(9.0)));
    assert_eq!(hello(own(reference(plain()))), (Some(4), Some(8.0)));
    assert_eq!(hello(own(reference(flags()))), (Some(6), Some(10.0)));
}

#[test]
fn the_home_is_found_in_the_environment() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    let home = |options: Options| {
        let host = Host::start(options.without_home_flag().home(path("user")));
        let home = host.hello()["home"].as_str().expect("a path").to_owned();
        assert_eq!(
            fs::metadata(&home)
                .expect("it was made")
                .permissions()
                .mode()
                & 0o777,
            0o700
        );
        home
    };
    let shown = |name: &str| path(name).to_str().expect("UTF-8").to_owned();
    assert_eq!(home(Options::new()), shown("user/.turnhost"));
    let hermes = || Options::new().env("HERMES_HOME", path("hermes"));
    assert_eq!(home(hermes()), shown("hermes"));
    let both = || hermes().env("TURNHOST_HOME", path("turnhost"));
    assert_eq!(home(both()), shown("turnhost"));
    let flag = both().args(["--home".into(), path("flag").into_os_string()]);
    assert_eq!(home(flag), shown("flag"));
}

#[test]
fn a_missing_home_is_made_for_its_owner_alone() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let home = folder.path().join("deep/er/home");
    check_works(Host::start(Options::new().home(&home)));
    let mode = |path: &Path| {
        fs::metadata(path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
            .permissions()
            .mode()
            & 0o777
    };
    assert_eq!(mode(&home), 0o700);
    assert_eq!(mode(&home.join("logs")), 0o700);
    assert_eq!(mode(&home.join("logs/turnhost.log")), 0o600);
}

#[test]
fn a_home_that_cannot_be_used_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("file");
    fs::write(&file, "x").expect("a file");
    let shown = file.to_str().expect("UTF-8");
    check_refused(Options::new().home(&file), 1, &[shown, "folder", "--home"]);
    check_refused(
        Options::new().home(file.join("below")),
        1,
        &[shown, "--home"],
    );
    check_refused(
        Options::new().home("/proc/no/home"),
        1,
        &["/proc/no/home", "--home"],
    );
}

#[test]
fn a_home_of_another_user_is_refused_with_both_users() {
    if !is_root() {
        eprintln!("skipped: only root can give a folder away");
        return;
    }
    let home = tempfile::tempdir().expect("a temporary folder");
    chown(home.path(), Some(12345), None).expect("root may");
    let shown = home.path().to_str().expect("UTF-8");
    check_refused(
        Options::new().home(home.path()),
        1,
        &[shown, "12345", "user 0", "--home"],
    );
}

/// Whether this machine lets a test mount something that only it sees.
fn can_mount() -> bool {
    let can = Command::new("unshare")
        .args(["-m", "mount", "-t", "tmpfs", "tmpfs", "/tmp"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !can {
        eprintln!("skipped in part: no right to mount, so no full or read-only file system");
    }
    can
}

/// A host in a home with a file system of its own. The mount ends with the host.
fn mounted(prepare: &str) -> Options {
    Options::new().shell(&format!(
        r#"exec unshare -m sh -c 'mount -t tmpfs -o size=64k,mode=700 tmpfs "$HOME" && {prepare} && exec "$@" <&3 3<&-' sh "$@""#
    ))
}

#[test]
fn a_home_that_cannot_be_written_is_a_warning() {
    if is_root() {
        if can_mount() {
            let host = Host::start(mounted(r#"mount -o remount,ro "$HOME""#));
            let host = check_works(host);
            assert!(host.stderr().contains("logs/turnhost.log"));
        }
        return;
    }
    let home = tempfile::tempdir().expect("a temporary folder");
    fs::set_permissions(home.path(), fs::Permissions::from_mode(0o500)).expect("it is ours");
    let host = check_works(Host::start(Options::new().home(home.path())));
    assert!(host.stderr().contains("logs/turnhost.log"));
}

#[test]
fn a_full_home_costs_the_log_not_the_host() {
    if is_root() && can_mount() {
        let fill = r#"{ dd if=/dev/zero of="$HOME/fill" bs=1k count=100 2>/dev/null || true; }"#;
        let host = check_works(Host::start(mounted(fill)));
        assert!(host.stderr().contains("logs/turnhost.log"));
    }
    // A log on a device that is always full.
    let home = tempfile::tempdir().expect("a temporary folder");
    fs::create_dir(home.path().join("logs")).expect("a folder");
    symlink("/dev/full", home.path().join("logs/turnhost.log")).expect("a link");
    let host = check_works(Host::start(Options::new().home(home.path())));
    assert!(host.stderr().contains("turnhost.log"), "{}", host.stderr());
}

#[test]
fn a_log_folder_that_is_a_file_is_a_warning() {
    let home = tempfile::tempdir().expect("a temporary folder");
    fs::write(home.path().join("logs"), "x").expect("a file");
    let host = check_works(Host::start(Options::new().home(home.path())));
    let logs = home.path().join("logs");
    assert!(host.stderr().contains(logs.to_str().expect("UTF-8")));
}

#[test]
fn an_unreadable_config_is_named() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let config = home.path().join("config.yaml");
    fs::create_dir(&config).expect("a folder");
    let shown = config.to_str().expect("UTF-8");
    check_refused(Options::new().home(home.path()), 2, &[shown]);
}

#[test]
fn a_malformed_environment_is_said_not_fatal() {
    let host = Host::start(Options::default().env("TURNHOST_HEARTBEAT_SECS", "soon"));
    assert_eq!(host.hello()["heartbeat_secs"], 15.0);
    host.wait_stderr("TURNHOST_HEARTBEAT_SECS");
}

#[test]
fn the_log_level_is_chosen() {
    let quiet = check_works(Host::start(Options::new().env("TURNHOST_LOG", "error")));
    assert!(!quiet.stderr().contains("session finalized"));
    let plain = check_works(Host::start(Options::new()));
    assert!(plain.stderr().contains("session finalized"));
}

#[test]
fn a_log_that_is_a_pipe_is_a_warning() {
    for has_reader in [false, true] {
        let home = tempfile::tempdir().expect("a temporary folder");
        let log = home.path().join("logs/turnhost.log");
        fs::create_dir(home.path().join("logs")).expect("a folder");
        make_pipe(&log);
        // Open for both, which does not wait for another end. It is never read.
        let mut open = fs::OpenOptions::new();
        let _reader = has_reader.then(|| open.read(true).write(true).open(&log).expect("a pipe"));
        let mut host = Host::start(Options::with_faults().home(home.path()));
        // More than a pipe holds is logged.
        let steps = json!([{"panic": "0123456789".repeat(100)}]);
        for number in 0..100 {
            host.ask(&script_turn("s", &format!("r{number}"), &steps));
        }
        assert_eq!(host.ask(&turn("s", "r", "x")).kind(), "turn.end");
        host.close_stdin();
        assert_eq!(host.exit(), Exit::Code(0), "with a reader: {has_reader}");
        let shown = log.to_str().expect("UTF-8");
        assert!(host.stderr().contains(shown), "{}", host.stderr());
    }
}

#[test]
fn a_config_that_is_a_pipe_is_refused() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let config = home.path().join("config.yaml");
    make_pipe(&config);
    let shown = config.to_str().expect("UTF-8");
    check_refused(Options::new().home(home.path()), 2, &[shown]);
}

#[test]
fn a_profile_whose_config_is_a_pipe_costs_its_turn() {
    let profile = tempfile::tempdir().expect("a temporary folder");
    let config = profile.path().join("config.yaml");
    make_pipe(&config);
    let host = Host::start(Options::new());
    for number in 0..10 {
        // More of them than there are workers.
        let id = format!("r{number}");
        let mut frame = turn(&id, &id, "x");
        frame["profile_home"] = json!(profile.path());
        host.send(&frame);
    }
    assert_eq!(host.ask(&turn("other", "other", "x")).kind(), "turn.end");
    for number in 0..10 {
        let error = host.answer(&format!("r{number}"));
        assert_eq!(error.kind(), "turn.error", "{}", error.line());
        let message = error["message"].as_str().unwrap_or_default();
        assert!(
            message.contains(config.to_str().expect("UTF-8")),
            "{message}"
        );
    }
}
