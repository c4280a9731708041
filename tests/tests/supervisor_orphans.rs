//! SPEC §9: the record of the host, the lock, and the reaping of orphans.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use turnhost_protocol::process::Identity;
use turnhost_tests::gateway::{lives, wait_gone};
use turnhost_tests::host::Exit;
use turnhost_tests::{Gateway, Supervision, binary, turn};

/// A process of the test's own, ended with it.
struct Process(Child);

impl Process {
    fn start(words: &[&str]) -> Self {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).stdin(Stdio::piped());
        Self(command.spawn().expect("it can be started"))
    }

    /// In a session of its own, deaf to SIGTERM, with one more process in the session.
    fn start_deaf_session() -> Self {
        let mut child = Command::new("setsid")
            .args([
                "sh",
                "-c",
                "trap '' TERM; sleep 1000 & echo $!; wait; sleep 1000",
            ])
            .stdout(Stdio::piped())
            .spawn()
            .expect("setsid can be started");
        let mut first = [0; 1];
        let output = child.stdout.as_mut().expect("it is piped");
        output.read_exact(&mut first).expect("it says a pid");
        Self(child)
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).expect("a pid")
    }

    fn identity(&self) -> Identity {
        // The program is there once exec is done, which spawn waits for.
        Identity::of(self.pid()).expect("/proc").expect("it lives")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Home(TempDir);

impl Home {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn record(&self) -> PathBuf {
        self.path().join("state/compute-host.json")
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join("state").join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, content).unwrap();
        path
    }

    fn supervisor(&self, command: &str) -> Command {
        let mut program = Command::new(binary::supervisor());
        program.args([command, "--home"]).arg(self.path());
        program
    }

    fn reap(&self) -> String {
        let output = self.supervisor("reap").output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
}

/// A record of `process`, as a supervisor that died has left it.
fn record_of(identity: &Identity) -> Value {
    json!({
        "host_pid": identity.pid,
        "host_start_ticks": identity.start_ticks,
        "kernel_boot_id": identity.kernel_boot_id,
        "pid_namespace": identity.pid_namespace,
        "host_exe": identity.exe,
        "host_exe_dev_inode": identity.exe_dev_inode,
        "pgid": identity.pid,
        "boot_id": "b", "build_sha": "unknown",
        "supervisor_pid": 1, "supervisor_start_ticks": 0, "instance_id": "i",
        "started_at": 0.0, "argv": ["sleep", "1000"], "home": "/h",
    })
}

fn now() -> f64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.unwrap().as_secs_f64()
}

#[test]
fn the_record_says_who_the_host_is() {
    use std::os::unix::fs::PermissionsExt;
    let gateway = Gateway::start(Supervision::of_turnhost());
    gateway.wait_kind("hello", 1);
    // The hello is relayed a moment before its record is complete.
    let hello = &gateway.frames()[0];
    let mut record = gateway.record().unwrap();
    while record["boot_id"] == "" {
        record = gateway.record().unwrap();
    }
    let identity = Identity::of(gateway.host_pid(1)).unwrap().unwrap();
    let supervisor = Identity::of(gateway.pid()).unwrap().unwrap();
    let expected = record_of(&identity);
    for field in [
        "host_pid",
        "host_start_ticks",
        "kernel_boot_id",
        "pid_namespace",
        "host_exe",
        "host_exe_dev_inode",
        "pgid",
    ] {
        assert_eq!(record[field], expected[field], "{field}");
    }
    assert_eq!(record["boot_id"], hello["boot_id"]);
    assert_eq!(record["build_sha"], "unknown");
    assert_eq!(record["supervisor_pid"], gateway.pid());
    assert_eq!(record["supervisor_start_ticks"], supervisor.start_ticks);
    assert_eq!(record["instance_id"].as_str().unwrap().len(), 32);
    assert!((record["started_at"].as_f64().unwrap() - now()).abs() < 60.0);
    assert_eq!(record["argv"][0], binary::turnhost().to_str().unwrap());
    assert_eq!(record["home"], gateway.home().to_str().unwrap());
    let path = gateway.home().join("state/compute-host.json");
    assert_eq!(
        std::fs::metadata(path).unwrap().permissions().mode() & 0o777,
        0o600
    );
}

#[test]
fn a_late_exit_does_not_remove_the_next_hosts_record() {
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    gateway.fake("exit");
    gateway.wait_kind("hello", 2);
    gateway.ask(&turn("s", "t", "x"));
    assert_eq!(gateway.record().unwrap()["host_pid"], gateway.host_pid(2));
    // Nor does it remove one that somebody else has put there.
    let mut foreign = gateway.record().unwrap();
    foreign["instance_id"] = json!("another");
    let path = gateway.home().join("state/compute-host.json");
    std::fs::write(&path, foreign.to_string()).unwrap();
    gateway.close_stdin();
    assert_eq!(gateway.exit(), Exit::Code(0));
    assert!(path.exists());
}

#[test]
fn a_second_supervisor_and_a_reap_touch_nothing() {
    let mut first = Gateway::start(Supervision::of_fake(&[]));
    let before = first.record().unwrap();
    for command in [vec!["run", "--", "/bin/cat"], vec!["reap"]] {
        let output = Command::new(binary::supervisor())
            .arg(command[0])
            .arg("--home")
            .arg(first.home())
            .args(&command[1..])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(75));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(
            error.contains(&format!("another supervisor (pid {})", first.pid())),
            "{error}"
        );
        assert!(output.stdout.is_empty());
    }
    assert_eq!(first.record().unwrap(), before);
    assert_eq!(first.ask(&turn("s", "t", "x"))["type"], "turn.end");
}

#[test]
fn the_host_of_a_living_supervisor_is_no_orphan() {
    let mut first = Gateway::start(Supervision::of_fake(&[]));
    // A copy of a live home: its record is no claim on the host.
    let copy = Home::new();
    std::fs::create_dir_all(copy.path().join("state")).unwrap();
    let record = std::fs::read(first.home().join("state/compute-host.json")).unwrap();
    std::fs::write(copy.path().join("state/compute-host.json"), &record).unwrap();
    let reap = |arguments: &[&std::ffi::OsStr]| {
        Command::new(binary::supervisor())
            .arg("reap")
            .arg("--home")
            .arg(copy.path())
            .args(arguments)
            .output()
            .unwrap()
    };
    let output = reap(&[]);
    assert_eq!(output.stdout, b"pid-reuse-ignored\n", "{output:?}");
    // The same file under two homes: it stays with whoever wrote it.
    let shared = first.home().join("state/compute-host.json");
    let output = reap(&["--registry".as_ref(), shared.as_os_str()]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && error.contains("which lives"),
        "{error}"
    );
    assert_eq!(std::fs::read(&shared).unwrap(), record);
    assert_eq!(first.ask(&turn("s", "t", "x"))["type"], "turn.end");
}

#[test]
fn what_is_no_record_is_removed_and_nobody_is_signalled() {
    let own = Identity::own().unwrap();
    let whole = record_of(&own).to_string();
    let mut contents: Vec<Vec<u8>> = (0..whole.len())
        .map(|end| whole.as_bytes()[..end].to_vec())
        .collect();
    for text in [
        "null",
        "[]",
        "7",
        "{}",
        "{\"host_pid\":\"1\"}",
        "{\"host_pid\":-1}",
        "{\"host_pid\":1}",
        "\u{0}",
        "{\"host_pid\":99999999999}",
    ] {
        contents.push(text.as_bytes().to_vec());
    }
    contents.push(vec![0xff; 10]);
    let home = Home::new();
    for content in contents {
        home.write("compute-host.json", &content);
        let outcome = home.reap();
        assert_eq!(
            outcome,
            "invalid-registry",
            "{}",
            String::from_utf8_lossy(&content)
        );
        assert!(!home.record().exists());
    }
    assert_eq!(home.reap(), "none");
    // A link, a folder with something in it, a fifo.
    let target = home.write("target", &whole);
    std::os::unix::fs::symlink(&target, home.record()).unwrap();
    assert_eq!(home.reap(), "invalid-registry");
    assert!(target.exists() && !home.record().exists());
    std::fs::create_dir(home.record()).unwrap();
    std::fs::write(home.record().join("x"), "").unwrap();
    assert_eq!(home.reap(), "invalid-registry");
    assert!(!home.record().exists());
    assert!(
        Command::new("mkfifo")
            .arg(home.record())
            .status()
            .unwrap()
            .success()
    );
    assert_eq!(home.reap(), "invalid-registry");
    assert!(!home.record().exists());
}

#[test]
fn a_registered_host_that_is_gone_is_not_running() {
    let home = Home::new();
    let mut process = Process::start(&["sleep", "1000"]);
    let record = record_of(&process.identity()).to_string();
    home.write("compute-host.json", &record);
    // A zombie first, then nothing at all.
    process.0.kill().unwrap();
    assert!(turnhost_tests::gateway::ends(process.pid()));
    assert_eq!(home.reap(), "not-running");
    process.0.wait().unwrap();
    home.write("compute-host.json", &record);
    assert_eq!(home.reap(), "not-running");
    assert!(!home.record().exists());
}

#[test]
fn a_registered_host_is_terminated_with_its_session() {
    let home = Home::new();
    let mut process = Process::start(&["sleep", "1000"]);
    home.write(
        "compute-host.json",
        record_of(&process.identity()).to_string(),
    );
    assert_eq!(home.reap(), "terminated");
    assert!(!home.record().exists());
    assert!(!process.0.wait().unwrap().success());

    let mut deaf = Process::start_deaf_session();
    let members = session_members(deaf.pid());
    assert_eq!(members.len(), 2);
    home.write("compute-host.json", record_of(&deaf.identity()).to_string());
    let began = Instant::now();
    assert_eq!(home.reap(), "killed");
    assert!(began.elapsed() >= Duration::from_secs(10));
    deaf.0.wait().unwrap();
    for pid in members {
        assert!(!lives(pid));
    }
}

#[test]
fn what_an_orphan_starts_while_it_ends_is_ended_with_it() {
    let home = Home::new();
    // At SIGTERM it leaves a deaf process in its session a moment later, and lives on.
    let script = "trap 'sleep 1; (trap \"\" TERM; exec sleep 1000) & echo $!' TERM; echo 0; \
        while :; do sleep 0.1; done";
    let mut child = Command::new("setsid")
        .args(["sh", "-c", script])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
    let process = Process(child);
    let mut said = || {
        let mut line = String::new();
        std::io::BufRead::read_line(&mut output, &mut line).unwrap();
        line.trim().parse::<i32>().unwrap()
    };
    assert_eq!(said(), 0);
    home.write(
        "compute-host.json",
        record_of(&process.identity()).to_string(),
    );
    assert_eq!(home.reap(), "killed");
    assert!(!lives(said()));
    assert!(!home.record().exists());
}

#[test]
fn an_orphan_that_becomes_another_program_is_not_killed() {
    let home = Home::new();
    let process = Process::start(&["sh", "-c", "trap 'exec sleep 1000' TERM; echo; read line"]);
    let identity = process.identity();
    home.write("compute-host.json", record_of(&identity).to_string());
    std::thread::sleep(Duration::from_millis(200));
    // It was asked to end while it was what is registered; it lives, so it is not "terminated".
    assert_eq!(home.reap(), "pid-reuse-ignored");
    assert!(lives(process.pid()));
}

#[test]
fn a_stopped_host_is_continued_so_that_it_can_end() {
    let home = Home::new();
    let mut process = Process::start(&["sleep", "1000"]);
    let pid = rustix::process::Pid::from_child(&process.0);
    rustix::process::kill_process(pid, Signal::STOP).unwrap();
    home.write(
        "compute-host.json",
        record_of(&process.identity()).to_string(),
    );
    assert_eq!(home.reap(), "terminated");
    process.0.wait().unwrap();
}

fn session_members(session: i32) -> Vec<i32> {
    let pids = std::fs::read_dir("/proc").unwrap();
    let pids = pids.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let stat = turnhost_protocol::process::Stat::of(*pid);
        matches!(stat, Ok(Some(stat)) if stat.session == session)
    })
    .collect()
}

#[test]
fn doubt_means_no_signal() {
    let home = Home::new();
    let process = Process::start(&["sleep", "1000"]);
    let identity = process.identity();
    let changes = [
        ("host_start_ticks", json!(identity.start_ticks + 1)),
        ("kernel_boot_id", json!("another")),
        ("pid_namespace", json!("4:1")),
        ("host_exe_dev_inode", json!("1:1")),
    ];
    for (field, value) in changes {
        let mut record = record_of(&identity);
        record[field] = value;
        home.write("compute-host.json", record.to_string());
        assert_eq!(home.reap(), "pid-reuse-ignored", "{field}");
        assert!(lives(process.pid()));
        assert!(!home.record().exists());
    }
}

#[test]
fn a_record_of_the_reference_needs_the_same_program_and_an_older_process() {
    let home = Home::new();
    let cases: [(&[&str], Value, f64, bool); 8] = [
        // What runs, the registered command line, how much later than now it was registered.
        (&["sleep", "1000"], json!(["sleep", "1000"]), 1.0, true),
        (&["sleep", "1000"], json!(["sleep", "1000"]), -60.0, false),
        (
            &["sleep", "1000"],
            json!(["python3", "-m", "sleep"]),
            1.0,
            true,
        ),
        (
            &["sleep", "1000"],
            json!(["python3", "-m", "host"]),
            1.0,
            false,
        ),
        (&["sleep", "1000"], json!([]), 1.0, false),
        // It only mentions the module.
        (
            &[
                "sh",
                "-c",
                "exec tail -f /dev/null tui_gateway.compute_host",
            ],
            json!(["python3", "-m", "tui_gateway.compute_host"]),
            1.0,
            false,
        ),
        // An interpreter alone says nothing.
        (
            &["sh", "-c", "read line"],
            json!(["sh", "-c", "read line"]),
            1.0,
            false,
        ),
        (
            &["tail", "-f", "/dev/null"],
            json!(["/usr/bin/tail", "-f", "/dev/null"]),
            1.0,
            false,
        ),
    ];
    for name in ["compute-host.json", "dashboard-compute-host.json"] {
        for (words, argv, later, killed) in &cases {
            let mut process = Process::start(words);
            let record = json!({"host_pid": process.pid(), "boot_id": "stale",
                "build_sha": "unknown", "started_at": now() + later, "argv": argv});
            let path = home.write(name, record.to_string());
            let expected = if *killed {
                "terminated"
            } else {
                "pid-reuse-ignored"
            };
            assert_eq!(home.reap(), expected, "{words:?} {argv} {later}");
            assert_eq!(lives(process.pid()), !killed);
            assert!(!path.exists());
            process.0.kill().unwrap();
        }
    }
}

#[test]
fn the_record_of_this_very_process_does_not_end_it() {
    // A stale record of the reference that names a live, innocent process: this one.
    let home = Home::new();
    home.write(
        "dashboard-compute-host.json",
        json!({"host_pid": std::process::id(), "boot_id": "stale"}).to_string(),
    );
    assert_eq!(home.reap(), "pid-reuse-ignored");
    assert!(
        !home
            .path()
            .join("state/dashboard-compute-host.json")
            .exists()
    );
}

#[test]
fn ten_thousand_trials_signal_no_innocent_process() {
    let processes: Vec<_> = (0..4).map(|_| Process::start(&["sleep", "1000"])).collect();
    let folder = tempfile::tempdir().unwrap();
    let home =
        turnhost_protocol::home::Home::find(Some(folder.path().to_owned()), |_| None).unwrap();
    let registry = turnhost_supervisor::registry::Registry::lock(&home, None).unwrap();
    for trial in 0..10_000_u64 {
        let process = &processes[usize::try_from(trial % 4).unwrap()];
        let identity = process.identity();
        let mut record = record_of(&identity);
        match trial % 5 {
            0 => record["host_start_ticks"] = json!(identity.start_ticks.wrapping_sub(trial + 1)),
            1 => record["kernel_boot_id"] = json!(format!("boot {trial}")),
            2 => record["pid_namespace"] = json!(format!("4:{trial}")),
            3 => record["host_exe_dev_inode"] = json!(format!("{trial}:1")),
            // As the reference writes it: it was registered before the process began.
            _ => {
                record = json!({"host_pid": identity.pid, "argv": ["sleep", "1000"],
                "started_at": now() - 3_600.0 - trial as f64})
            }
        }
        std::fs::write(registry.path(), record.to_string()).unwrap();
        let reaped = turnhost_supervisor::reap::reap(&registry).unwrap();
        assert_eq!(reaped[0].outcome.name(), "pid-reuse-ignored", "{record}");
    }
    for process in &processes {
        assert!(lives(process.pid()));
    }
}

#[test]
fn a_recycled_pid_is_left_alone() {
    // A new pid namespace, in which the kernel gives the pid of a dead host to another process.
    let script = r#"
        sleep 1000 & host=$!
        ticks=$(cut -d' ' -f22 /proc/$host/stat)
        exe=$(stat -L -c '%Hd %Ld %i' /proc/$host/exe)
        set -- $exe; dev=$(( ($1 << 8) | $2 ))
        # Both may begin in the same clock tick: then once more.
        while :; do
            kill -9 $host; wait $host 2>/dev/null
            echo $((host - 1)) > /proc/sys/kernel/ns_last_pid || exit 77
            sleep 1000 & other=$!
            [ $other = $host ] || exit 78
            [ "$(cut -d' ' -f22 /proc/$other/stat)" = "$ticks" ] || break
        done
        ns=$(stat -L -c '%d:%i' /proc/self/ns/pid)
        boot=$(cat /proc/sys/kernel/random/boot_id)
        mkdir -p "$HOME_DIR/state"
        printf '{"host_pid":%d,"host_start_ticks":%d,"kernel_boot_id":"%s","pid_namespace":"%s",
            "host_exe":"/bin/sleep","host_exe_dev_inode":"%s","pgid":%d,"boot_id":"b","build_sha":"",
            "supervisor_pid":1,"supervisor_start_ticks":0,"instance_id":"i","started_at":0.0,
            "argv":[],"home":"/"}' $host $ticks "$boot" "$ns" "$(stat -L -c '%d:%i' /proc/$other/exe)" $host \
            > "$HOME_DIR/state/compute-host.json"
        "$SUPERVISOR" reap --home "$HOME_DIR"
        kill -0 $other && echo alive
    "#;
    let home = Home::new();
    let output = Command::new("unshare")
        .args([
            "--user",
            "--map-root-user",
            "--pid",
            "--fork",
            "--mount-proc",
            "sh",
            "-c",
            script,
        ])
        .env("HOME_DIR", home.path())
        .env("SUPERVISOR", binary::supervisor())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if text.is_empty() {
        eprintln!("skipped: {}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    assert_eq!(text, "pid-reuse-ignored\nalive\n", "{output:?}");
}

#[test]
fn a_new_supervisor_ends_the_orphan_of_a_killed_one() {
    let folder = tempfile::tempdir().unwrap();
    // A host that does not notice that its supervisor is gone.
    let how = Supervision::of_fake(&["--outlive-input"]).home(folder.path());
    let mut first = Gateway::start(how.clone());
    let orphan = first.host_pid(1);
    first.signal(Signal::KILL);
    assert_eq!(first.exit(), Exit::Signal(9));
    assert!(lives(orphan), "it outlives its input");
    let second = Gateway::start(how);
    second.wait_stderr("orphan of an earlier supervisor: terminated");
    wait_gone(orphan);
    assert_eq!(second.record().unwrap()["host_pid"], second.host_pid(1));
}

#[test]
fn status_shows_who_uses_the_home() {
    let status = |home: &Path| -> Value {
        let output = Command::new(binary::supervisor())
            .args(["status", "--json", "--home"])
            .arg(home)
            .output();
        serde_json::from_slice(&output.unwrap().stdout).unwrap()
    };
    let empty = Home::new();
    assert_eq!(status(empty.path())["state"], "stopped");
    let mut gateway = Gateway::start(Supervision::of_fake(&[]));
    let running = status(gateway.home());
    assert_eq!(running["state"], "running");
    assert_eq!(running["supervisor_pid"], gateway.pid());
    assert_eq!(running["host"]["pid"], gateway.host_pid(1));
    let table = Command::new(binary::supervisor())
        .args(["status", "--home"])
        .arg(gateway.home())
        .output();
    let table = String::from_utf8(table.unwrap().stdout).unwrap();
    assert!(
        table.contains(&format!("host        pid {}", gateway.host_pid(1))),
        "{table}"
    );
    gateway.close_stdin();
    gateway.exit();
    assert_eq!(status(gateway.home())["state"], "stopped");
    // One that gave up starts nothing any more.
    let how = Supervision::of_fake(&[]).args(["--respawn-max", "0"]);
    let mut gateway = Gateway::start(how);
    gateway.fake("exit");
    gateway.wait_kind("host.gave_up", 1);
    wait_gone(gateway.host_pid(1));
    let given_up = status(gateway.home());
    assert_eq!(given_up["state"], "hostless");
    assert_eq!(given_up["host"], Value::Null);
}

#[test]
fn no_host_takes_frames_without_a_record() {
    let how = Supervision::of_fake(&[]).args(["--registry", "/proc/no/record.json"]);
    let mut gateway = Gateway::spawn(how);
    gateway.send(&turn("s", "t", "x"));
    assert_eq!(gateway.answer("t")["execution_state"], "not_started");
    assert_eq!(gateway.exit(), Exit::Code(69));
    assert!(
        gateway.stderr().contains("cannot register the host"),
        "{}",
        gateway.stderr()
    );
}
