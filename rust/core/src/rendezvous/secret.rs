//! The secret that only the ranks of one job know, and the keys that come from it.
//!
//! A secret is 32 bytes that are never sent, stored or shown: every use takes a key of its own, derived under a label,
//! so that no use tells anything of another. A user gives one in a file, `unisono launch` makes one for its ranks, a
//! unique id carries one; where there are two, they are mixed, and a process must know both.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use hmac::{Hmac, Mac};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::users;

/// A secret file with fewer bytes than this is a password, which can be guessed.
const FEWEST_BYTES: usize = 16;
/// A secret file with more bytes than this is something else.
const MOST_BYTES: u64 = 64 << 10;
/// The permissions of the group and of others.
const NOT_THE_OWNER_S: u32 = 0o077;
/// The permissions that a file of root's may not have where another user's process reads it: root lets a group read a file on
/// purpose, as Kubernetes does for a secret of a pod.
const NOT_A_READER_S: u32 = 0o037;

/// A secret that only the ranks of one job know.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A new one.
    ///
    /// # Errors
    /// `System` when the kernel gives no random bytes.
    pub fn random() -> Result<Self> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes).map_err(|cause| Error::system("read random bytes", cause))?;
        Ok(Self(bytes))
    }

    /// The one that `bytes` stand for. They may have any length, but must be too many random ones to be guessed.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let hash = Sha256::new_with_prefix(b"unisono secret\0").chain_update(bytes);
        Self(hash.finalize().into())
    }

    /// A secret that only a process that knows both can make. The order counts.
    #[must_use]
    pub fn mix(&self, other: &Self) -> Self {
        Self(self.keyed(&[b"unisono mixed secret\0", &other.0]))
    }

    /// A key for the one purpose that `label` names; it tells nothing of the secret, or of the key of another label.
    pub fn derive(&self, label: &[u8]) -> [u8; 32] {
        self.keyed(&[b"unisono derived key\0", label])
    }

    /// The user's secret in the file at `path`, without white space at its end. As with the keys of ssh, only its owner
    /// may have access to the file, and the owner must be this process's user or root; a file of root's may be readable for
    /// a group, where the process has another user.
    ///
    /// # Errors
    /// `System` when it cannot be read, `InvalidArgument` when others than its owner can read or change it, or it is
    /// shorter than 16 bytes.
    pub fn read_file(path: &Path) -> Result<Self> {
        let doing = || format!("read secret file {}", path.display());
        let failed = |cause| Error::system(doing(), cause);
        // Without waiting for the writer of a pipe, which is refused below.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
            .map_err(failed)?;
        check_owner(&file, path)?;
        let mut bytes = Vec::new();
        file.take(MOST_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(failed)?;
        if bytes.len() as u64 > MOST_BYTES {
            return Err(Error::invalid(format!(
                "secret file {} has more than {MOST_BYTES} bytes and is something else",
                path.display()
            )));
        }
        let secret = bytes.trim_ascii_end();
        if secret.len() < FEWEST_BYTES {
            return Err(Error::invalid(format!(
                "secret file {} holds {} bytes, but {FEWEST_BYTES} or more random ones are needed, such as those of \
                 `openssl rand -hex 32`",
                path.display(),
                secret.len()
            )));
        }
        Ok(Self::from_bytes(secret))
    }

    fn keyed(&self, parts: &[&[u8]]) -> [u8; 32] {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes any key");
        for part in parts {
            mac.update(part);
        }
        mac.finalize().into_bytes().into()
    }
}

impl fmt::Debug for Secret {
    /// Nothing of it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// Refuses a secret file that another user could have read or written. The open file is looked at, not the path, which
/// may lead elsewhere a moment later.
fn check_owner(file: &File, path: &Path) -> Result<()> {
    let path = path.display();
    let about = file
        .metadata()
        .map_err(|cause| Error::system(format!("look at secret file {path}"), cause))?;
    if !about.is_file() {
        return Err(Error::invalid(format!(
            "secret file {path} is no regular file"
        )));
    }
    let user = rustix::process::geteuid().as_raw();
    if !users::is_own(about.uid()) && about.uid() != 0 {
        return Err(Error::invalid(format!(
            "secret file {path} belongs to {}, who can read and change it; it must belong to user {user}, who \
             runs this process, or to root: copy it to a file of your own and `chmod 600` that",
            users::name(about.uid())
        )));
    }
    // Its own file root can close to others, as every user can.
    let forbidden = match about.uid() == user {
        true => NOT_THE_OWNER_S,
        false => NOT_A_READER_S,
    };
    if about.mode() & forbidden != 0 {
        return Err(Error::invalid(format!(
            "secret file {path} has mode {:04o}, so that others than its owner have access to it: `chmod 600 {path}`, \
             and make a new secret if another user may have read this one",
            about.mode() & 0o7777
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;
    use crate::error::Code;
    use crate::skips::skipped;
    use crate::temporary::Temporary;

    /// A file that holds `content`, with `mode`.
    fn file(content: &str, mode: u32) -> Temporary {
        let file = Temporary::new();
        fs::write(&file.0, content).expect("write");
        fs::set_permissions(&file.0, Permissions::from_mode(mode)).expect("a mode");
        file
    }

    #[test]
    fn keys_differ_by_secret_label_and_order() {
        let (one, two) = (Secret::from_bytes(b"one"), Secret::from_bytes(b"two"));
        let random = Secret::random().expect("random");
        assert!(random != Secret::random().expect("random"));
        assert_eq!(one, Secret::from_bytes(b"one"));
        let mut keys = vec![
            one.0,
            one.derive(b""),
            one.derive(b"a"),
            two.derive(b"a"),
            one.mix(&two).0,
            two.mix(&one).0,
            one.mix(&one).0,
            one.derive(&two.0),
        ];
        let count = keys.len();
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), count);
        assert_eq!(format!("{random:?}"), "Secret");
    }

    #[test]
    fn a_file_is_read_without_its_last_line_end() {
        let text = "0123456789abcdef";
        let file = file(&format!("{text}\n"), 0o600);
        let secret = Secret::read_file(&file.0).expect("long enough");
        assert_eq!(secret, Secret::from_bytes(text.as_bytes()));
        // Where a link leads to, as the secrets of Kubernetes do, counts.
        let link = file.0.with_extension("link");
        symlink(&file.0, &link).expect("a link");
        assert_eq!(Secret::read_file(&link).expect("the same"), secret);
        fs::remove_file(link).expect("remove");
    }

    #[test]
    fn what_is_no_secret_is_refused() {
        let refused = |path: &Path| Secret::read_file(path).expect_err("refused");
        let short = file("short\n", 0o600);
        assert_eq!(refused(&short.0).code, Code::InvalidArgument);
        assert!(refused(&short.0).message.contains("openssl rand"));
        let long = file(&"x".repeat(MOST_BYTES as usize + 1), 0o600);
        assert!(refused(&long.0).message.contains("something else"));
        assert_eq!(refused(Path::new("/nonexistent")).code, Code::System);
        assert!(refused(&std::env::temp_dir()).message.contains("regular"));
        let fifo = long.0.with_extension("fifo");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, mode).expect("a pipe");
        assert!(refused(&fifo).message.contains("regular"));
        fs::remove_file(fifo).expect("remove");
    }

    #[test]
    fn a_file_that_others_can_reach_is_refused_with_what_to_do() {
        for mode in [0o604, 0o620, 0o602, 0o644, 0o640, 0o440] {
            let file = file("0123456789abcdef", mode);
            let error = Secret::read_file(&file.0).expect_err("not private");
            assert_eq!(error.code, Code::InvalidArgument);
            let says = format!("has mode {mode:04o}");
            assert!(error.message.contains(&says), "{error}");
            assert!(error.message.contains("chmod 600"), "{error}");
        }
        Secret::read_file(&file("0123456789abcdef", 0o400).0).expect("private");
    }

    #[test]
    fn a_group_may_read_a_file_of_root_for_a_process_of_another_user() {
        if !rustix::process::geteuid().is_root() {
            skipped("only root can make a file of root");
            return;
        }
        let read = |mode| {
            let file = file("0123456789abcdef", mode);
            chown(&file.0, Some(0), Some(65534)).expect("a group");
            // Another user of that group: the thread's own numbers alone are changed.
            let nobody = (
                rustix::process::Uid::from_raw(65534),
                rustix::process::Gid::from_raw(65534),
            );
            std::thread::scope(|scope| {
                let thread = scope.spawn(|| {
                    rustix::thread::set_thread_res_gid(None, nobody.1, None).expect("a group");
                    rustix::thread::set_thread_res_uid(None, nobody.0, None).expect("a user");
                    Secret::read_file(&file.0)
                });
                thread.join().expect("no panic")
            })
        };
        read(0o440).expect("as Kubernetes makes it");
        for mode in [0o460, 0o444] {
            let error = read(mode).expect_err("not private");
            assert!(error.message.contains("chmod 600"), "{error}");
        }
    }

    #[test]
    fn a_file_of_another_user_is_refused() {
        if !rustix::process::geteuid().is_root() {
            skipped("only root can give a file to another user");
            return;
        }
        let file = file("0123456789abcdef", 0o600);
        chown(&file.0, Some(65534), None).expect("give away");
        let error = Secret::read_file(&file.0).expect_err("another user's");
        assert_eq!(error.code, Code::InvalidArgument);
        assert!(error.message.contains("belongs to user 65534"), "{error}");
    }
}
