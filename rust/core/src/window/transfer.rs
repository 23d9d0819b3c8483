//! A transfer through a port: what a put or a get begins where memory is not mapped.

use std::sync::Arc;
use std::time::Duration;

use super::state::Shared;
use crate::error::{Error, Result};
use crate::one_sided::{self, Port, RemoteRegion};

/// A put or a get under way, or ended. Dropping it does not end it.
#[derive(Clone)]
pub struct Transfer {
    inner: one_sided::Transfer,
    window: Arc<Shared>,
    place: usize,
    what: &'static str,
    bytes: usize,
}

impl Transfer {
    /// Begins to move bytes of the memory of the rank at `place`, as `begin` says. Without any bytes there is nothing to do.
    pub(super) fn start(
        window: &Arc<Shared>,
        place: usize,
        (what, offset, bytes): (&'static str, usize, usize),
        begin: impl FnOnce(&Port, &RemoteRegion) -> Result<one_sided::Transfer>,
    ) -> Result<Option<Self>> {
        let blame = |error| blame(window, place, (what, bytes), error);
        if bytes == 0 {
            return Ok(None);
        }
        let Some(far) = &window.peers[place].far else {
            let what = "there is no way to the memory of the rank";
            return Err(blame(Error::internal(what)));
        };
        let port = far.connect(&window.comm, place).map_err(blame)?;
        let remote = far
            .remote
            .part(offset as u64, bytes as u64)
            .map_err(blame)?;
        let inner = begin(&port, &remote).map_err(blame)?;
        far.keep(&inner);
        Ok(Some(Self {
            inner,
            window: Arc::clone(window),
            place,
            what,
            bytes,
        }))
    }

    /// Whether it has ended, well or not.
    pub fn is_done(&self) -> bool {
        self.inner.is_done()
    }

    /// The result, if it has ended.
    pub fn result(&self) -> Option<Result<()>> {
        Some(self.told(self.inner.result()?))
    }

    /// Waits for the end, driving the transfer from this thread meanwhile.
    ///
    /// # Errors
    /// The transfer's own; or `Timeout` when `timeout` runs out first, after which the transfer goes on.
    pub fn wait(&self, timeout: Option<Duration>) -> Result<()> {
        self.told(self.inner.wait(timeout))
    }

    fn told(&self, result: Result<()>) -> Result<()> {
        let what = (self.what, self.bytes);
        result.map_err(|error| blame(&self.window, self.place, what, error))
    }
}

#[cold]
fn blame(window: &Shared, place: usize, (what, bytes): (&str, usize), error: Error) -> Error {
    let name = window.name(place);
    let operation = format!("{what} rank {}, {bytes} bytes", window.number(place));
    // A port knows its peer by no name, and its ranks are those of a pair.
    let error = Error {
        message: format!("{name}: {}", error.message),
        peer: None,
        ..error
    };
    window.blame(error, place, &operation)
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.inner.fmt(f)
    }
}
