//! Whose file it is. In a shared directory such as /tmp another user may have put a file of that name first, or a link to
//! somewhere else. So the path itself must be a regular file, which belongs to this process's user and which no other can
//! write; links are not followed, pipes and devices not waited for.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use crate::error::{Code, Error, Result};
use crate::users;

/// Opens or makes the file at `path`, which no other user may have put there or can change.
pub(super) fn open_own(path: &Path) -> Result<File> {
    // Between the two attempts of a round another rank may make the file, or remove it.
    for _ in 0..100 {
        for makes in [false, true] {
            let opened = OpenOptions::new()
                .read(true)
                .write(true)
                .create_new(makes)
                .mode(0o600)
                .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
                .open(path);
            match (opened, makes) {
                (Ok(file), _) => return check_owner(&file, path).map(|()| file),
                (Err(cause), false) if cause.kind() == io::ErrorKind::NotFound => {}
                (Err(cause), true) if cause.kind() == io::ErrorKind::AlreadyExists => {}
                (Err(cause), _) if cause.raw_os_error() == Some(libc::ELOOP) => {
                    return Err(untrusted(path, "is a link; give the path that it leads to"));
                }
                // A pipe that is not read.
                (Err(cause), _) if cause.raw_os_error() == Some(libc::ENXIO) => {
                    return Err(untrusted(path, "is no regular file"));
                }
                (Err(cause), _) => {
                    let doing = format!("open store file {}", path.display());
                    return Err(Error::system(doing, cause));
                }
            }
        }
    }
    let doing = format!("open store file {}", path.display());
    Err(Error::system(doing, "it comes and goes"))
}

/// Refuses a file that another user could have written. The open file is looked at, since the path may lead elsewhere
/// a moment later.
fn check_owner(file: &File, path: &Path) -> Result<()> {
    let about = file
        .metadata()
        .map_err(|cause| Error::system(format!("look at store file {}", path.display()), cause))?;
    if !about.is_file() {
        return Err(untrusted(path, "is no regular file"));
    }
    let user = rustix::process::geteuid().as_raw();
    if !users::is_own(about.uid()) {
        let why = format!(
            "belongs to {}, not to user {user}, who runs this process; remove it or use another path, best in a \
             directory of your own",
            users::name(about.uid())
        );
        return Err(untrusted(path, &why));
    }
    if about.mode() & 0o022 != 0 {
        let why = format!(
            "has mode {:04o}, so that other users can write to it; `chmod 600` it, or remove it",
            about.mode() & 0o7777
        );
        return Err(untrusted(path, &why));
    }
    Ok(())
}

fn untrusted(path: &Path, why: &str) -> Error {
    let message = format!("store file {} {why}", path.display());
    Error::new(Code::Untrusted, message)
}
