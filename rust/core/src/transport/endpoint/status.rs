//! Answers the question of `unisono status`: which groups this process is in, and what goes on in each.
//!
//! A process of the same user connects to an abstract Unix socket, `unisono-status-PID-RANDOM`, and reads one JSON object up
//! to the end of the stream. It need not write anything. The accepting thread takes the connection, and a thread of those that
//! make links answers it. The caller's threads have no part in that: a rank answers whatever its program does, unless it is
//! stopped.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::membership::Membership;
use super::shared::Shared;

/// The number of the form of an answer.
const FORM: u32 = 3;

/// How long a client may take to read its answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Writes the answer.
///
/// # Errors
/// Those of the stream.
pub(super) fn answer(shared: &Shared, mut stream: &UnixStream) -> std::io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let text = state(shared).to_string();
    stream.write_all(text.as_bytes())
}

fn state(shared: &Shared) -> Value {
    let members: Vec<Arc<Membership>> = shared.groups.lock().values().cloned().collect();
    let mut groups: Vec<Value> = members.iter().filter_map(|it| it.status()).collect();
    // The largest come first: those of the whole job.
    let order = |group: &Value| {
        let world = group["ranks"].as_array().map_or(0, Vec::len);
        (std::cmp::Reverse(world), group["id"].to_string())
    };
    groups.sort_by_cached_key(order);
    json!({
        "form": FORM,
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "host": shared.address.hostname,
        "groups": groups,
    })
}
