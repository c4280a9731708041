//! SPEC §9: what a host is given: environment, descriptors, a session, flags.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::path::Path;

use serde_json::Value;
use turnhost_tests::{Gateway, Supervision};

/// Starts a supervisor whose host writes down what it was given.
fn given(how: impl FnOnce(Supervision) -> Supervision, config: &str) -> (Value, Gateway) {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.yaml"), config).unwrap();
    let dump = folder.path().join("dump.json");
    let fake = Supervision::of_fake(&["--dump", dump.to_str().unwrap()]).home(folder.path());
    let gateway = Gateway::start(how(fake));
    let given = serde_json::from_slice(&std::fs::read(&dump).unwrap()).unwrap();
    (given, gateway)
}

#[test]
fn the_environment_is_what_is_listed_and_asked_for() {
    let (given, gateway) = given(
        |how| {
            how.env("HERMES_DASHBOARD_SESSION_TOKEN", "secret")
                .env("SECRET", "secret")
                .env("FLAGGED", "f")
                .env("CHAT_KEY", "k")
                .env("LISTED", "l")
                .env("LC_ALL", "C")
                .env("TURNHOST_HOME", "/another/home")
                .env("HERMES_COMPUTE_HOST_HEARTBEAT_SECS", "7")
                .args(["--env", "FLAGGED", "--env", "GIVEN=x=y"])
        },
        "chat: {api_key_env: CHAT_KEY}\nsupervisor: {env_pass: [LISTED, HERMES_DASHBOARD_SESSION_TOKEN]}\nother: {x: 1}\n",
    );
    let home = gateway.home().to_str().unwrap();
    let environment = given["environment"].as_object().unwrap();
    for (name, value) in [
        ("FLAGGED", "f"),
        ("GIVEN", "x=y"),
        ("CHAT_KEY", "k"),
        ("LISTED", "l"),
        ("LC_ALL", "C"),
        ("TURNHOST_HOME", home),
        // This host is not ours, so it is told of the home by the reference's name too.
        ("HERMES_HOME", home),
        ("TURNHOST_HEARTBEAT_SECS", "7"),
        ("HERMES_COMPUTE_HOST_HEARTBEAT_SECS", "7"),
    ] {
        assert_eq!(environment[name], value, "{name}");
    }
    assert!(environment.contains_key("PATH") && environment.contains_key("HOME"));
    assert_eq!(environment.len(), 11, "{environment:?}");
}

#[test]
fn the_flag_for_heartbeats_wins_and_is_passed_on() {
    let (given, _gateway) = given(
        |how| {
            how.env("TURNHOST_HEARTBEAT_SECS", "7")
                .args(["--heartbeat-secs", "0.5"])
        },
        "host: {heartbeat_secs: 3}\n",
    );
    for name in [
        "TURNHOST_HEARTBEAT_SECS",
        "HERMES_COMPUTE_HOST_HEARTBEAT_SECS",
    ] {
        assert_eq!(given["environment"][name], "0.5");
    }
}

#[test]
fn three_descriptors_and_a_session_of_its_own() {
    // The shell leaves descriptors open that nobody meant for the host.
    let script = "exec 7</dev/null 9>/dev/null; exec \"$@\"";
    let (given, gateway) = given(|how| how.through_shell(script), "");
    assert_eq!(given["descriptors"], 3);
    assert_eq!(given["session"], gateway.host_pid(1));
}

#[test]
fn only_our_own_host_is_given_our_flags() {
    let (given, _gateway) = given(|how| how, "");
    let arguments = given["arguments"].as_array().unwrap();
    assert_eq!(arguments.len(), 3, "{arguments:?}");
    let gateway = Gateway::start(Supervision::of_turnhost());
    let record = gateway.record().unwrap();
    assert_eq!(record["argv"][1], "--parent-death-signal");
    assert_eq!(record["argv"][2], gateway.pid().to_string());
}

#[test]
fn a_wrong_config_is_code_2_and_says_where() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(
        folder.path().join("config.yaml"),
        "supervisor:\n  env_passed: [X]\n",
    )
    .unwrap();
    let mut gateway = Gateway::spawn(Supervision::of_fake(&[]).home(folder.path()));
    assert_eq!(gateway.exit(), turnhost_tests::host::Exit::Code(2));
    gateway.wait_stderr(&format!(
        "{}:2:",
        Path::new(folder.path()).join("config.yaml").display()
    ));
}

#[test]
fn the_default_host_is_the_one_beside_the_supervisor() {
    // Both programs are built into one folder.
    let _ = turnhost_tests::binary::turnhost();
    let gateway = Gateway::start(Supervision::of(Vec::<String>::new()));
    let record = gateway.record().unwrap();
    assert_eq!(
        record["argv"][0],
        turnhost_tests::binary::turnhost().to_str().unwrap()
    );
}
