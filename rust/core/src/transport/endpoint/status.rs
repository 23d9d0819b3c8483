//! Answers the question of `unisono status`: which groups this process is in, and what goes on in each.
//!
//! A process of the same user connects to an abstract Unix socket, `unisono-status-PID-RANDOM`, and reads one JSON object up
//! to the end of the stream. Before that it ends its side of the stream, or writes a question for ranks elsewhere and ends it
//! then ([`inquiry`]). The accepting thread takes the connection, and a thread of those that
//! make links answers it. The caller's threads have no part in that: a rank answers whatever its program does, unless it is
//! stopped.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use super::inquiry::{self, LONGEST_QUESTION, Question};
use super::membership::Membership;
use super::shared::Shared;

/// The number of the form of an answer.
pub(super) const FORM: u32 = 3;

/// How long a client may take to read its answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a client may take to write its question. One of an older version neither writes nor ends its side.
const QUESTION_TIMEOUT: Duration = Duration::from_millis(500);

/// Writes the answer to a question for ranks elsewhere, or the state of this process where there is none.
///
/// # Errors
/// Those of the stream.
pub(super) fn answer(shared: &Arc<Shared>, mut stream: &UnixStream) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
    let written = question(stream);
    let answer = match (Question::read(&written), &written[..]) {
        (Some(question), _) => inquiry::ask(shared, &question),
        (None, []) => state(shared),
        (None, _) => {
            json!({"form": FORM, "trouble": "this process does not understand the question"})
        }
    };
    stream.write_all(answer.to_string().as_bytes())
}

/// The bytes that come before the end of the client's side, within the time that it has for them. A question that is cut off is
/// none.
fn question(mut stream: &UnixStream) -> Vec<u8> {
    let deadline = Instant::now() + QUESTION_TIMEOUT;
    let (mut written, mut room) = (Vec::new(), [0; 4096]);
    while written.len() <= LONGEST_QUESTION {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || stream.set_read_timeout(Some(left)).is_err() {
            break;
        }
        match stream.read(&mut room) {
            Ok(count) if count > 0 => written.extend_from_slice(&room[..count]),
            _ => break,
        }
    }
    written
}

/// Takes the records of operations out of a state.
pub(super) fn leave_records_out(state: &mut Value) {
    let groups = state["groups"].as_array_mut().into_iter().flatten();
    for group in groups.filter_map(Value::as_object_mut) {
        group.remove("recent");
    }
}

/// The command of this process, and the system call that its main thread is in, for ranks that cannot look it up.
pub(super) fn program() -> Value {
    const LONGEST_FILE: u64 = 4 << 10;
    let read = |path: &str| {
        let mut text = Vec::new();
        // A kernel may not tell.
        let _ =
            std::fs::File::open(path).map(|file| file.take(LONGEST_FILE).read_to_end(&mut text));
        String::from_utf8_lossy(&text).replace('\0', " ")
    };
    let call = read(&format!("/proc/self/task/{}/syscall", std::process::id()));
    let first = call
        .split_whitespace()
        .nth(1)
        .and_then(|word| word.strip_prefix("0x"));
    let file = first.and_then(|word| u32::from_str_radix(word, 16).ok());
    let file = file.and_then(|number| std::fs::read_link(format!("/proc/self/fd/{number}")).ok());
    json!({
        "command": read("/proc/self/cmdline").trim(),
        "machine": std::env::consts::ARCH,
        "call": call.trim(),
        "file": file.unwrap_or_default().to_string_lossy(),
    })
}

/// The state of this process.
pub(super) fn state(shared: &Shared) -> Value {
    let members: Vec<Arc<Membership>> = shared.groups.lock().values().cloned().collect();
    let mut groups: Vec<Value> = members.iter().filter_map(|it| it.status()).collect();
    // The largest come first: those of the whole job.
    let order = |group: &Value| {
        let world = group["ranks"].as_array().map_or(0, Vec::len);
        (std::cmp::Reverse(world), group["id"].to_string())
    };
    groups.sort_by_cached_key(order);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    json!({
        "form": FORM,
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "host": shared.address.hostname,
        // Since the epoch: those of operations are as long ago as they say.
        "seconds": now.unwrap_or_default().as_secs_f64(),
        "groups": groups,
    })
}
