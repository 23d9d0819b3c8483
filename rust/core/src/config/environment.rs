//! The settings of the environment: which variables are ours, and which only look so.

use std::ffi::OsString;

use super::{Config, TABLE, unknown};
use crate::error::{Error, Result};

/// The beginning of every environment variable that unisono reads.
pub(super) const PREFIX: &str = "UNISONO_";

/// The variable by which `unisono launch` gives its ranks a secret. It is no setting, and is never shown.
pub(crate) const LAUNCH_SECRET: &str = "UNISONO_LAUNCH_SECRET";

/// Words by which modules and package managers (Spack, Lmod, EasyBuild, CMake, pkg-config) describe an installed package, in a
/// variable of its name and one of these words: where it lies, what to build with it, and its version.
///
/// Whole names, and not endings: `UNISONO_SECRET_PATH` is a slip that must be told.
const OF_AN_INSTALLATION: [&str; 18] = [
    "ROOT",
    "DIR",
    "HOME",
    "PATH",
    "PREFIX",
    "BASE",
    "VERSION",
    "BIN",
    "LIB",
    "LIBS",
    "LIBDIR",
    "LIBRARY",
    "LIBRARIES",
    "INC",
    "INCLUDE",
    "INCLUDES",
    "CFLAGS",
    "LDFLAGS",
];

/// Environment variables with our prefix that are not settings: the launcher's, those of `unisono run`, the build's, the
/// test suite's, and those that tell of an installation.
fn is_foreign(variable: &str) -> bool {
    matches!(
        variable,
        LAUNCH_SECRET | "UNISONO_AS_GLOO" | "UNISONO_RUN_MARK" | "UNISONO_TORCH_DIR"
    ) || variable.starts_with("UNISONO_TEST_")
        || variable
            .strip_prefix(PREFIX)
            .is_some_and(|word| OF_AN_INSTALLATION.contains(&word))
}

/// Whether Kubernetes made this variable of the name of a service, as it does for every container that does not ask it not
/// to.
fn is_service_link(variable: &str) -> bool {
    let is_of_port = |rest: &str| {
        let (number, rest) = rest.split_once('_').unwrap_or((rest, ""));
        let mut protocols = ["TCP", "UDP", "SCTP"].iter();
        number.parse::<u16>().is_ok() && protocols.any(|protocol| rest.starts_with(protocol))
    };
    variable.ends_with("_PORT")
        || ["_SERVICE_HOST", "_SERVICE_PORT"]
            .iter()
            .any(|part| variable.contains(part))
        || variable
            .rmatch_indices("_PORT_")
            .any(|(at, part)| is_of_port(&variable[at + part.len()..]))
}

impl Config {
    /// The defaults, changed by the `UNISONO_*` variables of the environment.
    ///
    /// # Errors
    /// `InvalidArgument` for a variable that is no setting (naming the nearest one) or a value it does not take.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(std::env::vars_os())
    }

    /// As [`Config::from_env`], from the given variables.
    ///
    /// # Errors
    /// As [`Config::from_env`].
    pub fn from_variables(
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self> {
        let mut config = Self::default();
        let variables: Vec<_> = variables.into_iter().collect();
        let in_a_pod = variables
            .iter()
            .any(|(name, _)| name == "KUBERNETES_SERVICE_HOST");
        for (variable, value) in variables {
            let Some(variable) = variable.to_str().filter(|v| v.starts_with(PREFIX)) else {
                continue;
            };
            if is_foreign(variable) {
                continue;
            }
            let Some(row) = TABLE.iter().find(|row| row.variable == variable) else {
                if in_a_pod && is_service_link(variable) {
                    continue;
                }
                let known = TABLE.iter().map(|row| row.variable);
                return Err(unknown("environment variable", variable, known));
            };
            let value = value.to_str().ok_or_else(|| {
                Error::invalid(format!("the value of {variable} is not valid UTF-8"))
            })?;
            config.set_row(row, row.variable, value)?;
        }
        Ok(config)
    }
}
