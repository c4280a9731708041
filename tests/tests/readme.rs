//! Every command of README.md is run, and what it shows is what comes out.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

use std::path::{Path, PathBuf};
use std::process::Command;

use turnhost_tests::binary;

/// A fenced block of README.md.
struct Block {
    language: String,
    text: String,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn readme() -> String {
    std::fs::read_to_string(root().join("README.md")).unwrap()
}

fn blocks() -> Vec<Block> {
    let readme = readme();
    let mut parts = readme.split("```").skip(1);
    let mut blocks = Vec::new();
    while let Some(block) = parts.next() {
        let (language, text) = block.split_once('\n').unwrap();
        blocks.push(Block {
            language: language.to_owned(),
            text: text.to_owned(),
        });
        parts.next();
    }
    blocks
}

/// Runs `command` at the root of the workspace; answers its output.
fn run(command: &mut Command) -> String {
    let output = command
        .current_dir(root())
        .env_remove("TURNHOST_HOME")
        .output()
        .unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{shown}\n{errors}",
        output.status
    );
    shown
}

/// `line` without what differs from run to run.
fn blanked(line: &str) -> String {
    let mut blanked = String::new();
    let mut rest = line;
    while let Some(at) = rest.find(|letter: char| letter.is_ascii_hexdigit()) {
        blanked.push_str(&rest[..at]);
        rest = &rest[at..];
        let length = rest
            .find(|letter: char| !letter.is_ascii_hexdigit())
            .unwrap_or(rest.len());
        let word = &rest[..length];
        let volatile =
            length == 32 || (length > 3 && word.bytes().all(|byte| byte.is_ascii_digit()));
        blanked.push_str(if volatile { "#" } else { word });
        rest = &rest[length..];
    }
    blanked + rest
}

/// Whether `line` is what is `shown`, where `…` stands for anything.
fn fits(shown: &str, line: &str) -> bool {
    let (shown, line) = (blanked(shown), blanked(line));
    let mut rest = line.as_str();
    for (index, part) in shown.split('…').enumerate() {
        match rest.find(part) {
            Some(at) if index > 0 || at == 0 => rest = &rest[at + part.len()..],
            _ => return false,
        }
    }
    true
}

#[test]
fn every_command_runs_and_shows_what_is_shown() {
    let blocks = blocks();
    let mut commands = 0;
    for (index, block) in blocks.iter().enumerate() {
        // The test command would run this test again.
        if block.language != "sh" || block.text.trim() == "tests/run" {
            continue;
        }
        commands += 1;
        let output = run(Command::new("bash").args(["-euo", "pipefail", "-c", &block.text]));
        let Some(shown) = blocks.get(index + 1).filter(|next| next.language == "json") else {
            continue;
        };
        let frames: Vec<&str> = output
            .lines()
            .filter(|line| line.starts_with('{'))
            .collect();
        let expected: Vec<&str> = shown.text.lines().collect();
        assert_eq!(frames.len(), expected.len(), "{output}");
        for (expected, frame) in expected.iter().zip(frames) {
            assert!(fits(expected, frame), "shown:\n{expected}\ncame:\n{frame}");
        }
    }
    assert!(commands >= 2, "README.md has lost its commands");
}

#[test]
fn the_python_example_runs() {
    let blocks = blocks();
    let example = blocks
        .iter()
        .find(|block| block.language == "python")
        .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("gateway.py");
    std::fs::write(&path, &example.text).unwrap();
    let output = run(Command::new("python3").arg(&path).arg(binary::turnhost()));
    assert_eq!(output, "hello from Python\n");
}

#[test]
fn every_flag_and_setting_exists() {
    let readme = readme();
    let help = run(Command::new(binary::turnhost()).arg("--help"));
    let flags: Vec<&str> = readme
        .lines()
        .filter(|line| line.starts_with("| `--"))
        .flat_map(|line| line.split('`').filter(|part| part.starts_with("--")))
        .map(|flag| flag.split(' ').next().unwrap())
        .collect();
    assert!(flags.len() >= 9);
    for flag in &flags {
        assert!(help.contains(flag), "{flag} is not in --help");
    }
    for line in help
        .lines()
        .filter_map(|line| line.trim().strip_prefix("--"))
    {
        let flag = format!("--{}", line.split(' ').next().unwrap());
        let own = flags.contains(&flag.as_str()) || flag == "--help" || flag == "--version";
        assert!(own, "{flag} is not in README.md");
    }
    let config = blocks()
        .into_iter()
        .find(|block| block.language == "yaml")
        .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    std::fs::write(&path, config.text).unwrap();
    turnhost_protocol::config::Config::read(&path).unwrap();
}
