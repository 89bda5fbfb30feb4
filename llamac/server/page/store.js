// What the browser keeps: conversations in IndexedDB, preferences in localStorage, the API key in this tab only.

const DATABASE = "llamac";
const TABLE = "conversations";
const PREFIX = "llamac.";

let opening = null;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("another tab blocks the conversations"));
  });
  return opening;
}

async function inTable(mode, call) {
  const transaction = (await database()).transaction(TABLE, mode);
  const request = call(transaction.objectStore(TABLE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error ?? request.error);
  });
}

/** All conversations, the latest first. */
export async function loadConversations() {
  const found = await inTable("readonly", (table) => table.getAll());
  return found.sort((a, b) => b.updated - a.updated);
}

/** Keep a conversation. */
export const saveConversation = (conversation) => inTable("readwrite", (table) => table.put(conversation));

/** Forget a conversation. */
export const deleteConversation = (id) => inTable("readwrite", (table) => table.delete(id));

/** A preference, or what it is by default. */
export function preference(name, otherwise) {
  try {
    const text = localStorage.getItem(PREFIX + name);
    return text === null ? otherwise : JSON.parse(text);
  } catch {  // the browser keeps nothing, or something else is kept under the name
    return otherwise;
  }
}

/** Keep a preference. */
export function setPreference(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
  } catch {
    // the browser keeps nothing: the preference lasts as long as the page
  }
}

let key = "";
try {
  key = sessionStorage.getItem(`${PREFIX}key`) ?? "";
} catch {
  // as above
}

/** The API key. */
export const apiKey = () => key;

/** Keep the API key until the tab is closed. */
export function setApiKey(value) {
  key = value;
  try {
    sessionStorage.setItem(`${PREFIX}key`, value);
  } catch {
    // as above
  }
}
