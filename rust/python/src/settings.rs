//! The core's table of settings, for Python.

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use unisono::config::{self, Config};

use crate::errors::exception;

pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Options>()?;
    module.add_class::<Setting>()?;
    module.add_function(wrap_pyfunction!(settings, module)?)
}

/// One row of the table of settings, as `settings` returns them.
#[pyclass(frozen, module = "unisono", name = "Setting", get_all)]
pub(crate) struct Setting {
    /// The keyword of `Options`.
    name: &'static str,
    /// The environment variable.
    variable: &'static str,
    /// The values that it takes, in words.
    accepts: &'static str,
    /// The default, as it would be written.
    default: &'static str,
    /// Whether every rank must have the same value.
    must_agree: bool,
    /// Its consequence, in one line.
    consequence: &'static str,
}

#[pymethods]
impl Setting {
    fn __repr__(&self) -> String {
        format!(
            "<unisono.Setting {}={}: {}>",
            self.name, self.default, self.consequence
        )
    }
}

/// Every setting that there is, in the order in which they are documented.
#[pyfunction]
fn settings() -> Vec<Setting> {
    let row = |row: &config::Setting| Setting {
        name: row.name,
        variable: row.variable,
        accepts: row.accepts,
        default: row.default,
        must_agree: row.must_agree,
        consequence: row.consequence,
    };
    Config::table().iter().map(row).collect()
}

/// Settings that a communicator is made with.
///
/// Each is a keyword; `settings` lists them with the consequence of each. A setting that is not given
/// here comes from its environment variable (``UNISONO_TIMEOUT`` for ``timeout``), or else is the
/// default. A value is a string as in the environment, or the number or path that it stands for;
/// None is as if it had not been given.
///
/// Options are a mapping from the names to the values that were given, as strings.
///
/// Raises
/// ------
/// InvalidArgumentError
///     There is no such setting (the message names the nearest), or it does not take the value.
///
/// Examples
/// --------
/// >>> comm = unisono.init(options=unisono.Options(transport="tcp", timeout=30))
#[pyclass(frozen, module = "unisono", name = "Options", mapping)]
#[derive(Clone, Default)]
pub(crate) struct Options {
    given: Vec<(String, String)>,
}

impl Options {
    /// The environment's settings, changed by these.
    pub(crate) fn apply(&self) -> unisono::error::Result<Config> {
        let mut config = Config::from_env()?;
        for (name, value) in &self.given {
            config.set(name, value)?;
        }
        crate::log::start(&config);
        Ok(config)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.given.iter().any(|(given, _)| given == name)
    }
}

#[pymethods]
impl Options {
    #[new]
    #[pyo3(signature = (**settings))]
    fn new(py: Python<'_>, settings: Option<&Bound<'_, PyDict>>) -> PyResult<Self> {
        let mut given = Vec::new();
        let mut config = Config::default();
        for (name, value) in settings.into_iter().flatten() {
            let name: String = name.extract()?;
            if value.is_none() && config.value(&name).is_some() {
                continue;
            }
            let text = if value.hasattr("total_seconds")? {
                value.call_method0("total_seconds")?.str()?
            } else {
                value.str()?
            };
            config
                .set(&name, &text.to_cow()?)
                .map_err(|error| exception(py, &error))?;
            let value = config.value(&name).unwrap_or_default();
            given.push((name, value));
        }
        Ok(Self { given })
    }

    /// The names of what was given.
    fn keys(&self) -> Vec<String> {
        self.given.iter().map(|(name, _)| name.clone()).collect()
    }

    fn __getitem__(&self, name: &str) -> PyResult<String> {
        let found = self.given.iter().find(|(given, _)| given == name);
        found
            .map(|(_, value)| value.clone())
            .ok_or_else(|| PyKeyError::new_err(name.to_owned()))
    }

    fn __len__(&self) -> usize {
        self.given.len()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        PyTuple::new(py, self.keys())?.call_method0("__iter__")
    }

    fn __repr__(&self) -> String {
        let given: Vec<_> = self
            .given
            .iter()
            .map(|(name, value)| format!("{name}={value:?}"))
            .collect();
        format!("Options({})", given.join(", "))
    }
}
