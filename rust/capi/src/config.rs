//! The core's table of settings, for C.

use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use unisono::config::{self, Config};
use unisono::error::{Error, Result};
use unisono::locks::Mutex;

use crate::error::{Status, output};
use crate::fence::{fence, text};
use crate::handles::Table;
use crate::sized::{Growing, sized_out};
use crate::types::string;

/// `unisono_config`.
#[repr(C)]
pub struct Settings {
    _opaque: [u8; 0],
}

/// `unisono_setting`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Setting {
    pub size: usize,
    pub name: *const c_char,
    pub variable: *const c_char,
    pub accepts: *const c_char,
    pub initial: *const c_char,
    pub consequence: *const c_char,
    pub must_agree: i32,
    pub reserved: i32,
}

static CONFIGS: Table<Mutex<Kept>> = Table::new(3, "a config");

/// A config, and the value that was asked for last.
struct Kept {
    config: Config,
    shown: CString,
}

/// The settings of the config that C gives; without one, those of the environment.
pub(crate) fn copy(config: *const Settings) -> Result<Config> {
    if config.is_null() {
        return Config::from_env();
    }
    Ok(CONFIGS.find(config)?.lock().config.clone())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_config_create(config: *mut *mut Settings) -> Status {
    fence(|| {
        let place = output("config", config)?;
        let kept = Kept {
            config: Config::from_env()?,
            shown: CString::default(),
        };
        place.write(CONFIGS.insert(Mutex::new(kept))?);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_config_set(
    config: *mut Settings,
    name: *const c_char,
    value: *const c_char,
) -> Status {
    fence(|| {
        let kept = CONFIGS.find(config)?;
        // SAFETY: the header asks for texts.
        let (name, value) = unsafe { (string("name", name)?, string("value", value)?) };
        kept.lock().config.set(name, value)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_config_value(
    config: *mut Settings,
    name: *const c_char,
    value: *mut *const c_char,
) -> Status {
    fence(|| {
        let kept = CONFIGS.find(config)?;
        // SAFETY: the header asks for a text.
        let name = unsafe { string("name", name)? };
        let place = output("value", value)?;
        let mut kept = kept.lock();
        match kept.config.value(name) {
            Some(shown) => kept.shown = text(shown),
            // With the nearest name that there is.
            None => kept.config.clone().set(name, "")?,
        }
        place.write(kept.shown.as_ptr());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_config_destroy(config: *mut Settings) -> Status {
    if config.is_null() {
        return Status::OK;
    }
    fence(|| CONFIGS.remove(config).map(drop))
}

// SAFETY: the size comes first.
unsafe impl Growing for Setting {
    const FIRST_SIZE: usize = 56;
}

/// The table as texts that C can read, made once.
struct Row {
    name: CString,
    variable: CString,
    accepts: CString,
    initial: CString,
    consequence: CString,
    must_agree: bool,
}

fn rows() -> &'static [Row] {
    static ROWS: OnceLock<Vec<Row>> = OnceLock::new();
    let row = |row: &config::Setting| Row {
        name: text(row.name),
        variable: text(row.variable),
        accepts: text(row.accepts),
        initial: text(row.default),
        consequence: text(row.consequence),
        must_agree: row.must_agree,
    };
    ROWS.get_or_init(|| Config::table().iter().map(row).collect())
}

#[unsafe(no_mangle)]
pub extern "C" fn unisono_setting_count() -> usize {
    Config::table().len()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn unisono_setting_at(index: usize, setting: *mut Setting) -> Status {
    fence(|| {
        let row = rows().get(index).ok_or_else(|| {
            Error::invalid(format!(
                "there is no setting {index}: there are {}",
                Config::table().len()
            ))
        })?;
        let value = Setting {
            size: 0,
            name: row.name.as_ptr(),
            variable: row.variable.as_ptr(),
            accepts: row.accepts.as_ptr(),
            initial: row.initial.as_ptr(),
            consequence: row.consequence.as_ptr(),
            must_agree: i32::from(row.must_agree),
            reserved: 0,
        };
        // SAFETY: the caller gives a struct of the size that it says.
        unsafe { sized_out("setting", setting, value) }
    })
}
